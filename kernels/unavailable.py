"""The one error of this room."""


class KernelUnavailable(Exception):
    """A kernel that was asked for by name cannot run here; one line that says how to mend it."""
