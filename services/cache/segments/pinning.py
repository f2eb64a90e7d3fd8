"""Pins of an open store: in their file first, then in the index."""

from finback.services.cache.segments import pins
from finback.services.cache.segments.options import StoreOptions
from finback.services.cache.segments.state import State
from finback.shared.errors import Unavailable

_NAME = "pins.json"


def load(options: StoreOptions) -> pins.Pins:
    """The pins as they were saved; none, and a line in the log, if they cannot be read."""
    try:
        return pins.load(options.own_folder / _NAME)
    except (OSError, ValueError) as error:
        options.log.warning("the pins cannot be read; there are none", error=str(error))
        return {}


def pin(state: State, name: str, salt: str, hashes: tuple[bytes, ...]) -> None:
    """Add or replace a pin. Raises `InvalidRequest` and `Unavailable`."""
    with state.writing:
        known = state.keeper.pins
        pins.check(known, name, hashes)
        _set(state, {**known, name: (salt, hashes)})


def unpin(state: State, name: str) -> bool:
    """Take a pin out; False if there is none of that name. Raises `Unavailable`."""
    with state.writing:
        known = state.keeper.pins
        if name not in known:
            return False
        _set(state, {key: pin for key, pin in known.items() if key != name})
        return True


def _set(state: State, wanted: pins.Pins) -> None:
    try:
        pins.save(state.options.own_folder / _NAME, wanted)
    except OSError as error:
        raise Unavailable(f"cannot keep pins: {error.strerror or error}") from None
    state.keeper.pins = wanted
    state.run(lambda: state.index.set_pins(wanted))
