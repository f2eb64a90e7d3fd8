"""Op `expert_mlp_w4a8`: experts of 4-bit weights and 8-bit activations; the contract is in reference.py."""
