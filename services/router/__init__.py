"""The router: admission, and the choice of (prefill, decode) instances for a request."""
