"""What the offline API raises for wrong input; also `ValueError`s, as Python callers expect."""

from finback.shared.errors import ConfigError, InvalidRequest


class InvalidInput(InvalidRequest, ValueError):
    """A prompt or a sampling parameter is wrong; `param` names it."""


class InvalidOption(ConfigError, ValueError):
    """An option of `LLM` is wrong; the message names it and its limit."""
