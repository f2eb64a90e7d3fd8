"""Op `route_experts`; the contract is the docstring of reference.py."""
