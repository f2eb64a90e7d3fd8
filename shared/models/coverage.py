"""Do a source and a model name the same tensors? Torch-free."""

from collections.abc import Iterable, Iterator, Mapping


def coverage_problems(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    ignorable: Iterable[str],
) -> Iterator[str]:
    """Every wanted tensor that is missing or has another shape, and what is left over."""
    for name, shape in wanted.items():
        if name not in found:
            yield f"tensor {name} is missing; the model is incomplete"
        elif tuple(found[name]) != shape:
            yield (
                f"tensor {name} is {list(found[name])}, expected {list(shape)}; "
                "config and weights do not fit each other"
            )
    left = sorted(set(found) - set(wanted) - set(ignorable))
    if left:
        yield (
            f"tensor {left[0]} is not known to this architecture ({len(left)} in all); "
            "the model would not be computed as it was trained"
        )
