"""The decode role: takes prompts over, batches continuously, streams tokens."""
