"""What children read must be what the supervisor meant."""

import tomllib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from finback.services.supervisor import child_config, topology
from finback.shared import config as settings


@given(
    name=st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20),
    aliases=st.lists(st.sampled_from(["a", "gpt-4o", "mödel"]), max_size=3),
    tokens=st.integers(0, 2**24),
    drafting=st.booleans(),
)
def test_a_child_reads_back_every_setting(
    name: str, aliases: list[str], tokens: int, drafting: bool
) -> None:
    config, _ = settings.load(
        env={},
        overrides={
            "model_name": name,
            "model_aliases": tuple(aliases),
            "max_model_len": tokens,
            "drafting": drafting,
        },
    )
    raw = tomllib.loads(child_config.to_toml(config))
    again, sources = settings.load(env={}, overrides=raw)
    assert again == config
    assert sources["max_model_len"] == "command line"


def test_secrets_go_by_environment_only() -> None:
    config, _ = settings.load(env={}, overrides={"nats_password": "hush", "nats_user": "u"})
    assert "hush" not in child_config.to_toml(config)


def test_the_environment_is_cleared_of_the_parents_settings() -> None:
    spec = topology.plan("separate", 2)[-1]
    env = child_config.environment(
        spec,
        config_file=Path("/x/config.toml"),
        instance="gateway-123456",
        nats_url="nats://127.0.0.1:1",
        user="gateway",
        password="p",
        base={
            "PATH": "/bin",
            "FINBACK_KERNEL_CACHE": "/k",
            "FINBACK_MODEL": "old",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://o",
        },
    )
    assert env["PATH"] == "/bin"
    assert "FINBACK_MODEL" not in env
    assert env["FINBACK_KERNEL_CACHE"] == "/k"
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in env
    assert env["FINBACK_INSTANCE"] == "gateway-123456"
    assert env["FINBACK_NATS_PASSWORD"] == "p"


def test_a_user_may_set_an_engines_threads() -> None:
    engine = topology.plan("cohost", 2)[0]
    env = child_config.environment(
        engine,
        config_file=Path("/x"),
        instance="decode-1",
        nats_url="n",
        user="",
        password="",
        base={"OMP_NUM_THREADS": "7"},
    )
    assert env["OMP_NUM_THREADS"] == "7"
    assert "FINBACK_NATS_USER" not in env
