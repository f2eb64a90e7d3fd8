"""The file tier of the KV cache: blocks in append-only segments on any POSIX directory."""
