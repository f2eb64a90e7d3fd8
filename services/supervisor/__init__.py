"""Starts, watches, restarts and stops the other services; holds the command line."""
