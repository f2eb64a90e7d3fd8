"""How a conversation becomes a prompt: Jinja templates, our own tool block, DeepSeek's recipe."""
