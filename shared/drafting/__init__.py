"""Guesses of coming tokens from the text itself: what to guess, and when it pays. Pure."""
