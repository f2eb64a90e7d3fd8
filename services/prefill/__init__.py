"""The prefill role: computes prompts and hands their KV blocks to decode."""
