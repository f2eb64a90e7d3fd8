"""Op `silu_mul`; the contract is the docstring of reference.py."""
