"""Op `rotary`; the contract is the docstring of reference.py."""
