"""Prefill on one host and decode on another, without common memory: the tokens of one host.

The hosts are namespaces: networks of their own, and under the same path a tmpfs each. Real services,
a small random network in deterministic mode.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from finback.shared.actor.bus import Message
from finback.shared.wire import codec
from finback.shared.wire.messages.decode import HandoffReply, HandoffRequest
from finback.shared.wire.messages.generate import SamplingSpec
from support.nats_server import NatsServer
from support.service_process import ServiceProcess
from support.two_hosts import Host, host, in_host, why_not
from support.worker_stack import MiniGateway

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.stack,
    pytest.mark.nats,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-"),
]
SAMPLING = SamplingSpec(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
PROMPT = np.random.default_rng(5).integers(1, 90, 200).tolist()
BLOCK_SIZE = 32
NUM_BLOCKS = -(-(len(PROMPT) - 1) // BLOCK_SIZE)
READY_S = 150.0


class Hosts:
    """Two hosts, a server that both reach, and services on either."""

    def __init__(self, folder: Path, stack: ExitStack, model: Path) -> None:
        self.folder, self.stack = folder, stack
        shm = folder / "shm"
        self.settings = {
            "model": str(model),
            "run_dir": str(folder / "run"),
            "shm_dir": str(shm),
            "stack_id": "two",
            "subject_prefix": "two",
            "deterministic": "true",
            "device": "cpu",
            "num_threads": "1",
            "block_size": str(BLOCK_SIZE),
            "kv_pool_bytes": str(32 << 20),
            "arena_bytes": str(32 << 20),
            "cluster_key": "5a" * 32,
        }
        self.server = NatsServer(folder=folder / "nats", host="0.0.0.0")
        self.server.start()
        stack.callback(self.server.kill)
        self.hosts = [stack.enter_context(host(n, i, shm)) for i, n in enumerate("ab", start=1)]

    def start_all(self, asked: list[tuple[Host, str, str, str]]) -> None:
        """Services at once: (host, service, instance, lane_dir)."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: self.start(*one), asked))

    def start(self, where: Host, service: str, instance: str, lane_dir: str) -> None:
        """One service on a host."""
        told = {**self.settings, "nats_url": f"nats://{where.gateway}:{self.server.port}"}
        told |= {"instance": instance, "lane_dir": lane_dir}
        env = {f"FINBACK_{name.upper()}": value for name, value in told.items() if value}
        roles = [] if service == "cache" else ["--roles", service]
        process = ServiceProcess(service, env, roles, READY_S, where.within)
        self.stack.callback(process.kill)
        process.start()


class Spy:
    """What is handed over, by lane, and what decode could not have."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.missing: list[int] = []
        self._replies: set[str] = set()

    async def listen(self, gateway: MiniGateway) -> "Spy":
        await gateway.bus.subscribe(
            gateway.subjects.instance("decode", "x", "handoff").replace(".x.", ".*."), self._asked
        )
        await gateway.bus.subscribe("_INBOX.>", self._answered)
        return self

    def _asked(self, message: Message) -> None:
        request = codec.decode(message.data, HandoffRequest)
        self.kinds += [ticket.kind for ticket in request.tickets]
        self._replies.add(message.reply or "")

    def _answered(self, message: Message) -> None:
        if message.subject in self._replies:
            self.missing += codec.decode(message.data, HandoffReply).missing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_folders import save_hf, tiny_hf_model  # transformers: slow to import

    return save_hf(tiny_hf_model("llama"), tmp_path_factory.mktemp("model"))


@pytest.fixture
def hosts(model: Path, tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(tmp_path, stack, model)


async def test_tokens_are_those_of_one_host(hosts: Hosts) -> None:
    a, b = hosts.hosts
    hosts.start_all([(a, "cache", "cache-near", ""), (b, "cache", "cache-far", "")])
    shm = str(hosts.folder / "shm" / "two" / "probe")
    assert in_host(a, ["cat", shm]) != in_host(b, ["cat", shm]), "one path, two arenas"
    common = str(hosts.folder / "common")
    decodes = {"shm": "decode-near", "nats": "decode-far", "file": "decode-files"}
    hosts.start_all(
        [
            (a, "prefill", "prefill-one", common),
            (a, "decode", decodes["shm"], ""),
            (b, "decode", decodes["nats"], ""),
            (b, "decode", decodes["file"], common),
        ]
    )
    gateway = await MiniGateway.connect(f"nats://127.0.0.1:{hosts.server.port}", "two")
    try:
        prefill = await gateway.instance_of("prefill")
        spy, tokens = await Spy().listen(gateway), {}
        for lane, name in decodes.items():
            others = tuple(other for other in decodes.values() if other != name)
            decode = await gateway.instance_of("decode", but=others)
            spy.kinds.clear()
            placed = await gateway.place(gateway.spec(PROMPT, SAMPLING), prefill, decode)
            tokens[lane] = (await placed.wait()).tokens
            assert spy.kinds == [lane] * NUM_BLOCKS
            assert spy.missing == [], "nothing was computed twice"
        assert len(tokens["shm"]) == SAMPLING.max_tokens
        assert tokens["nats"] == tokens["file"] == tokens["shm"]
    finally:
        await gateway.close()
