"""Models: where weights come from, and the networks that use them. The readers are torch-free."""
