"""The drafter service: guesses the next tokens from what the sequence said before."""
