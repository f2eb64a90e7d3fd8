"""Finback: a complete LLM inference service as actors on NATS."""
