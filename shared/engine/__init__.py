"""Paged KV, continuous batching and the device thread: what a worker process runs."""
