"""DeepSeek V4: compressed block KV, sliding-window state, hyper-connections, many small experts."""
