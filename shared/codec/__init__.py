"""Text to token ids and back: tokenizer, chat template, detokeniser, stop strings."""
