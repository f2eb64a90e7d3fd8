"""New keys and values into their sequences' rings."""
