"""Op `token_bitmask`; the contract is the docstring of reference.py."""
