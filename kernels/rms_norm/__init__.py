"""Op `rms_norm`; the contract is the docstring of reference.py."""
