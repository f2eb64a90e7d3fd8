"""Op `store_tail`; the contract is the docstring of reference.py."""
