"""Kill -9 at any moment: what was there before is there again, what is torn is not."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finback.services.cache.segments.disk import Disk
from support.segments import KEY, SALT, Clocks, hash_of, open_store, payload_of, read

ROOT = Path(__file__).parents[4]
ROUNDS = 7
SIZE = 40_000
NUM_BLOCKS = 60

# Puts, forgets and sweeps without end; says each number that was stored or forgotten for good.
CHILD = """
import random, sys
sys.path[:0] = {paths!r}
from support.segments import KEY, MIB, block, hash_of, open_store, Clocks
from finback.services.cache.segments.disk import Disk
from pathlib import Path
clocks, rng = Clocks(), random.Random({seed})
store = open_store(Path({folder!r}), clocks=clocks, disk=Disk(punch={punch}), segment_bytes=MIB,
                   encrypt={encrypt})
print("open", flush=True)
while True:
    number = rng.randrange({num_blocks})
    if rng.random() < 0.6:
        store.put(*block(number, {size}))
        print("put", number, flush=True)
    elif rng.random() < 0.7:
        print("forgetting", number, flush=True)
        store.forget(hashes=[hash_of(number)])
        print("forgot", number, flush=True)
    else:
        clocks.pass_s(5)
        store.sweep()
        print("swept", flush=True)
"""


def _run_and_kill(folder: Path, seed: int, *, punch: bool, encrypt: bool) -> list[list[str]]:
    """The lines of a child that was killed some time after its store was open."""
    program = CHILD.format(
        paths=[str(ROOT / ".src"), str(ROOT / "tests")],
        seed=seed,
        folder=str(folder),
        punch=punch,
        encrypt=encrypt,
        num_blocks=NUM_BLOCKS,
        size=SIZE,
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        first = child.stdout.readline()
        time.sleep(random.Random(seed).random() * 0.25)
    finally:
        os.kill(child.pid, signal.SIGKILL)
    rest = child.stdout.read()
    child.stdout.close()
    assert child.wait(30) == -signal.SIGKILL
    assert first == "open\n"
    return [line.split() for line in rest.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("punch", "encrypt"), [(True, False), (False, True)])
def test_killed_again_and_again(tmp_path: Path, punch: bool, encrypt: bool) -> None:
    held: set[int] = set()  # stored for certain
    gone: set[int] = set()  # forgotten for certain
    num_lines = 0
    for seed in range(ROUNDS):
        lines = _run_and_kill(tmp_path, seed, punch=punch, encrypt=encrypt)
        num_lines += len(lines)
        for verb, *rest in lines:
            numbers = {int(number) for number in rest if number.isdigit()}
            if verb == "put":
                held, gone = held | numbers, gone - numbers
            elif verb == "forgetting":
                held -= numbers
            elif verb == "forgot":
                gone |= numbers
        in_doubt = set(range(NUM_BLOCKS)) - held - gone
        if seed % 3 == 2:
            (tmp_path / "local" / "index.sqlite").unlink()
        store = open_store(tmp_path, encrypt=encrypt, disk=Disk(punch=punch))
        for number in range(NUM_BLOCKS):
            found = read(store, number, SIZE)
            assert found in ("absent", payload_of(number, SIZE))
            assert number not in held or found != "absent", (seed, number)
            # The child may have stored it again and died before it said so.
            if number in gone and found != "absent":
                gone.discard(number)
            if number in in_doubt or number not in gone:
                (held.add if found != "absent" else held.discard)(number)
        store.check_integrity()
        assert "removed.corrupt" not in store.stats().counts
        store.close()
    assert num_lines > 20


def test_what_was_forgotten_stays_so_when_the_index_is_lost_after_a_kill(tmp_path: Path) -> None:
    _run_and_kill(tmp_path, 99, punch=True, encrypt=False)
    store = open_store(tmp_path)
    num_gone = store.forget(everything=True)
    assert num_gone > 0
    store.close()
    (tmp_path / "local" / "index.sqlite").unlink()
    store = open_store(tmp_path, cluster_key=KEY, clocks=Clocks())
    assert list(store.records()) == []
    assert not any(store.lookup(SALT, [hash_of(number) for number in range(NUM_BLOCKS)]))
    data = b"".join(path.read_bytes() for path in tmp_path.glob("local/seg-*.kv"))
    assert not any(payload_of(number, SIZE)[99:131] in data for number in range(NUM_BLOCKS))
    store.close()
