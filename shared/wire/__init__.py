"""What travels between services: messages, their codec, headers and subjects."""
