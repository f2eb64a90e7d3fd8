"""Op `hyper_mix`; the contract is the docstring of reference.py."""
