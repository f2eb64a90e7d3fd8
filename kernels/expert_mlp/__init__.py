"""Op `expert_mlp`; the contract is the docstring of reference.py."""
