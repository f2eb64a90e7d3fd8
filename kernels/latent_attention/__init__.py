"""Op `latent_attention`; the contract is the docstring of reference.py."""
