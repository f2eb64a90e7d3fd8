"""Op `store_entries`; the contract is the docstring of reference.py."""
