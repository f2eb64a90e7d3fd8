"""Op `linear`; the contract is the docstring of reference.py."""
