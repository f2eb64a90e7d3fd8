"""Op `norm_rotary_pairs`; the contract is the docstring of reference.py."""
