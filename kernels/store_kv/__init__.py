"""Op `store_kv`; the contract is the docstring of reference.py."""
