"""What a KV block is: its key, its host layout, and whom it fits. Torch-free."""
