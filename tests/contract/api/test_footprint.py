"""What a gateway costs: CPU to start (its wall time on an idle machine), memory when serving."""

import os
import sys
import time
from pathlib import Path

import pytest

from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer

MAX_PSS_MB = 120
# The aim is one second; tests share their cores with others, which makes CPU time longer, too.
MAX_START_CPU_S = 2.0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_start_and_memory(nats_server: NatsServer, tmp_path: Path) -> None:
    stack = GatewayStack(nats_server.url, "footprint", tmp_path)
    try:
        process = stack.spawn("gateway")
        end_s = time.monotonic() + 30
        while '"serving"' not in (tmp_path / "gateway.log").read_text():
            assert time.monotonic() < end_s
            time.sleep(0.02)
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        pss_mb = int(rollup.split("Pss:")[1].split()[0]) / 1024
        assert cpu_s < MAX_START_CPU_S
        assert pss_mb < MAX_PSS_MB
    finally:
        stack.stop()
