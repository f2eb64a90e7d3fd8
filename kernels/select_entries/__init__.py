"""Op `select_entries`; the contract is the docstring of reference.py."""
