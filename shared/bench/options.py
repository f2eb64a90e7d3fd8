"""What a bench is asked to do, checked once. Pure."""

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from finback.shared.bench import workloads
from finback.shared.bench.chat_load import MAX_REQUESTS, chat_requests
from finback.shared.bench.targets import Targets
from finback.shared.bench.workloads import Request
from finback.shared.errors import ConfigError

CHAT: Final = "chat"
NAMES: Final = (*workloads.FIXED, CHAT)
Mode = Literal["offline", "http", "nats"]
DEFAULT_REPEAT: Final[dict[str, int]] = {"offline": 5, "http": 3, "nats": 3}
# Of `chat`, when neither a number nor a duration is given.
DEFAULT_CHAT_REQUESTS: Final = 100
MAX_RATES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Raises `ConfigError` that names the field and its limit.

    `rates_per_s`: of `chat` alone, one run for each. `num_requests` 0: all of the list. `scale`:
    every length times this. `concurrency` 0: all at once, or as they come. `clients`: processes that
    make the load. `is_whole`: offline by `generate`, without times of single tokens. `has_limit`: measure
    the machine's ceilings first. `timeout_s`: the longest life of a request.
    """

    workload: str
    mode: Mode
    repeat: int = 0
    warm_up: int = 0
    num_requests: int = 0
    duration_s: float = 0.0
    rates_per_s: tuple[float, ...] = ()
    scale: float = 1.0
    concurrency: int = 0
    clients: int = 1
    seed: int = 0
    temperature: float = 0.6
    timeout_s: float = 600.0
    targets: Targets | None = None
    is_whole: bool = False
    has_limit: bool = True
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.workload not in NAMES:
            raise ConfigError(f"workload must be one of {', '.join(NAMES)}; not {self.workload!r}")
        _check("repeat", self.num_repetitions, 1, 1000)
        _check("warm_up", self.warm_up, 0, 100)
        most = workloads.SIZES.get(self.workload, MAX_REQUESTS)
        _check(f"num_requests of {self.workload}", self.num_requests, 0, most)
        _check("duration", self.duration_s, 0, 86_400)
        _check("scale", self.scale, 0.001, 1)
        _check("concurrency", self.concurrency, 0, 65_536)
        _check("clients", self.clients, 1, 256)
        _check("seed", self.seed, 0, 2**20)
        _check("temperature", self.temperature, 0, 2)
        _check("timeout", self.timeout_s, 0.1, 86_400)
        self._check_chat()
        self._check_offline()

    def _check_chat(self) -> None:
        if self.workload != CHAT:
            for name, value in (("rate", self.rates_per_s), ("duration", self.duration_s)):
                if value:
                    raise ConfigError(f"{name} belongs to the workload chat, not {self.workload}")
            return
        if not self.rates_per_s:
            raise ConfigError("rate must be given for chat, in requests a second: --rate 2")
        if len(self.rates_per_s) > MAX_RATES:
            raise ConfigError(f"rate: at most {MAX_RATES} of them, not {len(self.rates_per_s)}")
        for rate in self.rates_per_s:
            _check("rate", rate, 0.001, 100_000)

    def _check_offline(self) -> None:
        if self.mode != "offline":
            if self.is_whole:
                raise ConfigError("whole needs --offline: a service is timed as it streams")
            if self.engine:
                raise ConfigError("set needs --offline: a running stack has its settings already")
            return
        if self.clients != 1:
            raise ConfigError("clients must be 1 with --offline: the engine is in one process")
        if self.is_whole and (self.workload == CHAT or self.targets is not None):
            raise ConfigError(
                "whole gives no times of tokens: leave off --targets, or take no chat"
            )

    @property
    def num_repetitions(self) -> int:
        return self.repeat or DEFAULT_REPEAT[self.mode]

    @property
    def is_open(self) -> bool:
        """Requests come when they come, whether or not earlier ones are answered."""
        return self.workload == CHAT

    def requests(self, vocab_size: int, rate_per_s: float | None) -> list[Request]:
        """The list of one run."""
        if self.workload != CHAT:
            found = workloads.workload(self.workload, vocab_size)
            return workloads.scaled(found[: self.num_requests or None], self.scale)
        limited = self.num_requests or (0 if self.duration_s else DEFAULT_CHAT_REQUESTS)
        found = chat_requests(
            rate_per_s=rate_per_s or self.rates_per_s[0],
            vocab_size=vocab_size,
            seed=self.seed,
            num_requests=limited,
            duration_s=self.duration_s,
        )
        return workloads.scaled(found, self.scale)


def parse_rates(text: str) -> tuple[float, ...]:
    """`1,2,4` as numbers. Raises `ConfigError`."""
    found = []
    for part in text.split(","):
        try:
            found.append(float(part))
        except ValueError:
            raise ConfigError(f"rate must be numbers such as 1,2,4, not {part!r}") from None
    return tuple(found)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{name} must be from {low:g} to {high:g}, not {value:g}")
