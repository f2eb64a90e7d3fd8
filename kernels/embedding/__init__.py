"""Op `embedding`; the contract is the docstring of reference.py."""
