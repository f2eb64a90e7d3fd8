"""Op `expert_mlp_fp4`: `expert_mlp` over weights that stay in 4 bits; the contract is in reference.py."""
