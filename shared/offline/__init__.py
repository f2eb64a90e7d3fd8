"""The offline API: the service's engine inside the caller's process, without a bus."""
