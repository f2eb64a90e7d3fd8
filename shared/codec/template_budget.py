"""What keeps a chat template from running away: it comes with the model file, so it is not trusted.

Loops, calls, concatenations and multiplications draw on one budget a render; a template that
outruns it fails as a bad template, it does not hang or fill the memory of the process.
"""

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Final, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finback.shared.clock import monotonic_s

MAX_ITERATIONS: Final = 1_000_000
MAX_TEXT_CHARS: Final = 16 * 2**20
MAX_SECONDS: Final = 2.0
MAX_WIDTH: Final = 10_000
# How many iterations pass between two looks at the clock.
_CLOCK_EVERY: Final = 256

_WIDTH_FILTERS: Final = ("center", "indent", "wordwrap", "truncate", "batch", "slice", "round")
_EACH: Final = "_finback_each"
_JOINED: Final = "_finback_joined"


class Budget:
    """The iterations and the time that one render may still use."""

    __slots__ = ("_deadline_s", "_left")

    def __init__(self) -> None:
        self._left = MAX_ITERATIONS
        self._deadline_s = monotonic_s() + MAX_SECONDS

    def spend(self) -> None:
        """Count one iteration or call; raises when the budget is used up."""
        self._left -= 1
        if self._left < 0:
            raise SecurityError("the chat template loops too often")
        if self._left % _CLOCK_EVERY == 0 and monotonic_s() > self._deadline_s:
            raise SecurityError("the chat template takes too long")


# The budget of the render that runs in this context; renders may overlap on several threads.
BUDGET: Final[ContextVar[Budget]] = ContextVar("finback_template_budget")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, drawing on `BUDGET`, which a render sets before it begins."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters[_EACH] = self._each
        self.filters[_JOINED] = self._joined
        self.filters["replace"] = _bounded_replace(self.filters["replace"])
        for name in _WIDTH_FILTERS:
            self.filters[name] = _bounded_width(self.filters[name])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, _EACH)
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_filtered(nodes.List(concat.nodes), _JOINED)]
        tree.set_environment(self)
        return tree

    def call(self, context: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        BUDGET.get().spend()
        _check_widths(args)
        return super().call(context, target, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        BUDGET.get().spend()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        budget = BUDGET.get()
        for item in items:
            budget.spend()
            yield item

    def _joined(self, parts: list[Any]) -> str:
        BUDGET.get().spend()
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_TEXT_CHARS:
        raise SecurityError("the chat template builds too long a text")


def _check_widths(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values):
        raise SecurityError("the chat template asks for too large a width or count")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "+" and isinstance(left, str) and isinstance(right, str):
        _check_size(len(left) + len(right))
    if operator == "*":
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(times, int):
                _check_size(len(text) * times)
    if operator == "**":
        _check_widths((left, right))
    if operator == "%" and isinstance(left, str):
        digits = max((len(run) for run in _digit_runs(left)), default=0)
        _check_size(10**digits if digits > 4 else 0)


def _digit_runs(text: str) -> list[str]:
    return "".join(char if char.isdigit() else " " for char in text).split()


def _bounded_width(original: Any) -> Any:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_widths([*args, *kwargs.values()])
        return original(*args, **kwargs)

    return _like(original, bounded)


def _bounded_replace(original: Any) -> Any:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        texts = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        # text, old, new: every place between two characters could take one `new`.
        _check_size((len(texts[0]) + 1) * max(1, len(texts[-1])) if len(texts) > 2 else 0)
        return original(*args, **kwargs)

    return _like(original, bounded)


def _like(original: Any, wrapper: Any) -> Any:
    """Carry over Jinja's mark for filters that want the context or the environment."""
    mark = getattr(original, "jinja_pass_arg", None)
    if mark is not None:
        wrapper.jinja_pass_arg = mark
    return wrapper
