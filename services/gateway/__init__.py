"""The gateway: the public HTTP and NATS APIs, and the owner of every request from start to end."""
