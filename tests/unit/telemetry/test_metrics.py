"""Names, labels and the two ways out."""

from finback.shared.telemetry import metrics as m
from finback.shared.telemetry.metrics import Metrics


def test_counters_gauges_histograms_render_under_prometheus_names() -> None:
    metrics = Metrics()
    metrics.count("finback.router.placed", decode="decode-1")
    metrics.count("finback.router.placed", 2, decode="decode-1")
    metrics.gauge("finback.bus.connected", 1)
    metrics.observe(m.TIME_TO_FIRST_TOKEN, 0.05)
    text = metrics.render().decode()
    assert 'finback_router_placed_total{decode="decode-1"} 3.0' in text
    assert "finback_bus_connected 1.0" in text
    assert 'gen_ai_server_time_to_first_token_seconds_bucket{le="0.06"} 1.0' in text


def test_value_and_snapshot() -> None:
    metrics = Metrics()
    assert metrics.value("finback.x") == 0
    metrics.count("finback.x")
    metrics.count("finback.y", kind="a")
    metrics.observe("finback.z", 2.0)
    assert metrics.value("finback.x") == 1
    assert metrics.value("finback.y", kind="a") == 1
    snapshot = metrics.snapshot()
    assert snapshot['finback_y_total{kind="a"}'] == 1
    assert snapshot["finback_z_sum"] == 2.0
    assert not any("bucket" in key for key in snapshot)
