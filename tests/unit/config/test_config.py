"""Sources and their order, and the one line that each mistake gets."""

from pathlib import Path

import pytest

from finback.shared.config import load, settings
from finback.shared.errors import ConfigError


def test_later_sources_win_and_are_named(tmp_path: Path) -> None:
    file = tmp_path / "finback.toml"
    file.write_text("max_queue = 7\nblock_size = 32\nlog_level = 'debug'\n")
    config, sources = load(
        file,
        {"FINBACK_MAX_QUEUE": "8", "FINBACK_BLOCK_SIZE": "16", "PATH": "/bin"},
        {"max_queue": 9, "drafting": None},
    )
    assert (config.max_queue, config.block_size, config.log_level) == (9, 16, "debug")
    assert sources["max_queue"] == "command line"
    assert sources["block_size"] == "FINBACK_BLOCK_SIZE"
    assert sources["log_level"] == str(file)
    assert sources["drafting"] == "default"


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("max_queue = 7\n")
    assert load(None, {"FINBACK_CONFIG": str(file)})[0].max_queue == 7


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DRAFTING", "yes", True),
        ("DRAFTING", "off", False),
        ("KV_POOL_BYTES", "1_000_000", 1_000_000),
        ("LEASE_TTL_S", "2.5", 2.5),
        ("LEASE_TTL_S", "2", 2.0),
        ("MODEL_ALIASES", "a, b,", ("a", "b")),
        ("MODEL_ALIASES", "", ()),
    ],
)
def test_text_becomes_the_right_type(name: str, text: str, value: object) -> None:
    config, _ = load(None, {f"FINBACK_{name}": text})
    found = getattr(config, name.lower())
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"FINBACK_MAX_QUEU": "1"}, ("FINBACK_MAX_QUEU", "FINBACK_MAX_QUEUE")),
        ({"FINBACK_XYZZY_PLUGH": "1"}, ("FINBACK_XYZZY_PLUGH", "finback config")),
        ({"FINBACK_MAX_QUEUE": "many"}, ("max_queue", "whole number", "FINBACK_MAX_QUEUE")),
        ({"FINBACK_MAX_QUEUE": "0"}, ("max_queue", "at least 1", "FINBACK_MAX_QUEUE")),
        ({"FINBACK_MAX_QUEUE": "-1"}, ("max_queue", "at least 1")),
        ({"FINBACK_LEASE_TTL_S": "nan"}, ("lease_ttl_s", "at least 1 s")),
        ({"FINBACK_LEASE_TTL_S": "1e9"}, ("lease_ttl_s", "at most 300 s")),
        ({"FINBACK_DEVICE": "gpu"}, ("device", "auto, cpu, cuda, npu", "'gpu'")),
        ({"FINBACK_DRAFTING": "maybe"}, ("drafting", "true or false", "'maybe'")),
    ],
)
def test_a_mistake_is_one_line_that_helps(env: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, env)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max_qeue = 1", ("max_qeue", "max_queue")),
        ("max_queue = '1'\nx", ("not TOML",)),
        ("max_queue = 1.5", ("max_queue", "whole number")),
        ("max_queue = true", ("max_queue", "whole number")),
        ("drafting = 1", ("drafting", "true or false")),
        ("model = 3", ("model", "text")),
        ("[http]\nport = 1", ("http",)),
        ("model_aliases = [1]", ("model_aliases", "list of texts")),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, content: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "finback.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(file, {})
    for word in (*words, str(file)):
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load(tmp_path / "nowhere.toml", {})


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {}, {"nats_password": 12345})
    assert "12345" not in str(caught.value)


def test_otel_variable_counts_unless_ours_is_set() -> None:
    otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}
    config, sources = load(None, otel)
    assert config.otlp_endpoint == "http://a:4318"
    assert sources["otlp_endpoint"] == "OTEL_EXPORTER_OTLP_ENDPOINT"
    config, _ = load(None, {**otel, "FINBACK_OTLP_ENDPOINT": "http://b:4318"})
    assert config.otlp_endpoint == "http://b:4318"


def test_what_follows_is_filled_in(tmp_path: Path) -> None:
    config, sources = load(None, {"FINBACK_RUN_DIR": str(tmp_path / "a")})
    other, _ = load(None, {"FINBACK_RUN_DIR": str(tmp_path / "b")})
    assert config.trace_dir == str(tmp_path / "a" / "traces")
    assert config.stack_id and config.stack_id != other.stack_id
    assert config.model_name == "SmolLM2-135M-Instruct"
    assert sources["stack_id"] == "derived"
    named, _ = load(None, {"FINBACK_MODEL": "/models/Qwen3-0.6B.gguf"})
    assert named.model_name == "Qwen3-0.6B"


def test_every_setting_is_explained() -> None:
    for name, (_, told) in settings().items():
        assert told.help, name
