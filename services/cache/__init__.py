"""The cache service: owns the host arena through which KV blocks are handed over."""
