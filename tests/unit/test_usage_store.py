"""The count of usage: sums, several writers, what is forgotten."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finback.shared.usage_store import UsageCounts, UsageKey, UsageStore

HOUR_S = 3600
ROWS = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from("ab"), st.sampled_from(["completed", "failed"]),
        st.integers(0, 2**40),
    ),
    max_size=12,
)  # fmt: skip


def key(hour: int, tenant: str, outcome: str = "completed") -> UsageKey:
    return UsageKey(hour_s=hour * HOUR_S, tenant=tenant, model="m", outcome=outcome)


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ROWS)
def test_sums_are_those_of_a_counter(tmp_path: Path, rows: list[tuple[int, str, str, int]]) -> None:
    path = tmp_path / "usage.sqlite"
    path.unlink(missing_ok=True)
    twin: Counter[UsageKey] = Counter()
    for hour, tenant, outcome, tokens in rows:
        kind = key(hour, tenant, outcome)
        UsageStore(path).add({kind: UsageCounts(num_requests=1, num_prompt_tokens=tokens)})
        twin[kind] += tokens
    found = UsageStore(path).read()
    assert {kind: counts.num_prompt_tokens for kind, counts in found} == dict(twin)
    assert sum(counts.num_requests for _, counts in found) == len(rows)
    assert [kind.hour_s for kind, _ in found] == sorted(kind.hour_s for kind, _ in found)
    only = UsageStore(path).read(since_s=2 * HOUR_S + 5, tenant="a")
    assert [kind for kind, _ in only] == [
        kind for kind, _ in found if kind.hour_s >= 2 * HOUR_S and kind.tenant == "a"
    ]


def test_old_hours_are_dropped_and_only_the_owner_reads(tmp_path: Path) -> None:
    store = UsageStore(tmp_path / "sub" / "usage.sqlite")
    assert store.read() == []
    store.add({key(hour, "a"): UsageCounts(num_requests=1) for hour in range(4)})
    assert store.drop_before(2 * HOUR_S) == 2
    assert [kind.hour_s // HOUR_S for kind, _ in store.read()] == [2, 3]
    for path in (tmp_path / "sub").iterdir():
        assert path.stat().st_mode & 0o077 == 0


def test_several_processes_write_one_file(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from finback.shared.usage_store import UsageCounts, UsageKey, UsageStore\n"
        "store = UsageStore(Path(sys.argv[1]))\n"
        "kind = UsageKey(hour_s=0, tenant='t', model='m', outcome='completed')\n"
        "for _ in range(25): store.add({kind: UsageCounts(num_requests=1)})\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "usage.sqlite")]
    root = Path(__file__).parents[2] / ".src"
    env = {**os.environ, "PYTHONPATH": str(root)}
    writers = [subprocess.Popen(command, env=env) for _ in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    ((_, counts),) = UsageStore(tmp_path / "usage.sqlite").read()
    assert counts.num_requests == 75
