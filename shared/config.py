"""Every setting of Finback, declared once: default, help, unit and range beside the field.

Sources, weakest first: defaults, a TOML file, `FINBACK_*` variables, overrides (command line). A key
that is not known, or a value out of range, stops the start with one line (`ConfigError`).
"""

import dataclasses
import difflib
import hashlib
import os
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finback.shared.errors import ConfigError
from finback.shared.setting import Setting, parse, setting

ENV_PREFIX: Final = "FINBACK_"
# Variables that share the prefix and are no settings: where the settings are, what a supervisor
# tells its children, the key a client sends, where `make setup` finds torch, and where compiled
# kernels are kept.
NOT_SETTINGS: Final = frozenset(
    {
        "FINBACK_CONFIG",
        "FINBACK_INSTANCE",
        "FINBACK_SUPERVISOR_PID",
        "FINBACK_API_KEY",
        "FINBACK_TORCH_INDEX",
        "FINBACK_KERNEL_CACHE",
    }
)
EMBEDDED_NAME: Final = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """The whole stack's settings. Empty text and 0 mean "chosen from what is there"."""

    # Model
    model: str = setting("embedded", "'embedded', or a path to a GGUF file or Hugging Face folder")
    model_name: str = setting("", "name the model is served under; empty: from the model")
    model_aliases: tuple[str, ...] = setting(
        ("gpt-4o", "gpt-4o-mini", "gpt-3.5-turbo"), "further names for the served model"
    )
    max_model_len: int = setting(
        0, "longest prompt plus answer; 0: the model's", unit="tokens", low=0, high=2**24
    )
    weights_dtype: str = setting(
        "auto",
        "how weights are held; stored: as in the file, dequantised at use (deepseek_v4)",
        choices=("auto", "f32", "f16", "bf16", "stored"),
    )
    output_format: str = setting(
        "auto",
        "how the model writes reasoning and tool calls; auto: from its template",
        choices=(
            "auto",
            "hermes",
            "qwen3-coder",
            "llama3",
            "json",
            "deepseek-v4",
            "deepseek-v4.1",
            "plain",
        ),
    )

    # Where things lie
    run_dir: str = setting(".finback", "folder of this stack: sockets, logs, traces, state")
    shm_dir: str = setting("", "tmpfs for KV blocks; empty: /dev/shm, else <run_dir>/shm")
    lane_dir: str = setting(
        "", "folder that all hosts see (3FS, NFS), to hand KV over between hosts; empty: over NATS"
    )
    mask_lane: str = setting(
        "auto",
        "how masks come to decode; auto: by shared memory on one host, else by message",
        choices=("auto", "message"),
    )
    trace_dir: str = setting("", "span files; empty: <run_dir>/traces")
    log_dir: str = setting("", "log files; empty: <run_dir>/logs")
    stack_id: str = setting("", "keeps stacks on one bus apart; empty: from run_dir")
    subject_prefix: str = setting("finback", "first token of every subject")

    # Bus
    nats_url: str = setting("", "NATS server; empty: `finback up` starts a private one")
    nats_user: str = setting("", "NATS user")
    nats_password: str = setting("", "NATS password", is_secret=True)
    nats_ca_file: str = setting("", "certificate authority for tls:// servers")

    # HTTP
    http_host: str = setting("127.0.0.1", "address the gateway listens on")
    http_port: int = setting(0, "port the gateway listens on; 0: a free one", low=0, high=65535)
    api_keys_file: str = setting("", "hashed API keys; empty: no key is asked for")

    http_is_private: bool = setting(
        False, "strangers cannot reach http_host (a container's): no key is needed"
    )

    # Shape
    roles_layout: str = setting(
        "auto",
        "prefill and decode in one process or two",
        choices=("auto", "cohost", "separate"),
    )
    decode_processes: int = setting(
        1, "decode processes of a stack; answers of one that dies go on in others", low=1, high=64
    )
    deterministic: bool = setting(False, "one numeric path for every batch and chunking")
    drafting: bool = setting(False, "ask the drafter for tokens")
    draft_tokens: int = setting(4, "tokens drafted for a step", unit="tokens", low=1, high=16)
    grammar_tokens: int = setting(
        8,
        "tokens of a constrained sequence that a step takes at most beyond one: forced, or drafted",
        unit="tokens",
        low=0,
        high=16,
    )
    num_threads: int = setting(0, "CPU threads of an engine; 0: the cores given", low=0, high=1024)
    device: str = setting("auto", "where engines compute", choices=("auto", "cpu", "cuda", "npu"))
    kernel_backend: str = setting("auto", "'auto', 'reference' or a backend's name")

    # KV
    kv_dtype: str = setting("auto", "how KV is held", choices=("auto", "f32", "f16", "bf16"))
    kv_pool_bytes: int = setting(
        0, "KV pool of an engine; 0: from free memory", unit="bytes", low=0, high=2**48
    )
    cluster_key: str = setting(
        "", "key of block hashes, 64 hex digits; one for all gateways and engines", is_secret=True
    )
    cluster_key_file: str = setting(
        "", "file with the cluster_key; empty: `finback up` makes <run_dir>/cluster.key"
    )
    block_size: int = setting(
        0, "tokens in a KV block; 0: the model's choice", unit="tokens", low=0, high=1024
    )
    arena_bytes: int = setting(
        2**30, "largest size of a host's KV arena", unit="bytes", low=2**20, high=2**48
    )

    # Kept KV blocks
    prefix_caching: bool = setting(True, "reuse KV where prompts begin alike")
    state_replay: str = setting(
        "exact",
        "how a lost window state is computed again; bounded: approximately, from fewer tokens",
        choices=("exact", "bounded"),
    )
    state_replay_tokens: int = setting(
        128, "most tokens of a bounded replay", unit="tokens", low=1, high=2**20
    )
    state_snapshot_bytes: int = setting(
        64 * 2**20, "window states that an engine keeps", unit="bytes", low=0, high=2**40
    )
    cache_retention_agent_s: float = setting(
        259_200.0, "for which blocks of agents are kept", unit="s", low=0, high=10**9
    )
    cache_retention_chat_s: float = setting(
        604_800.0, "for which blocks of chats are kept", unit="s", low=0, high=10**9
    )
    cache_retention_batch_s: float = setting(
        0.0,
        "for which blocks of batches are kept; 0: while there is room",
        unit="s",
        low=0,
        high=10**9,
    )
    cache_retention_state_s: float = setting(
        180.0, "for which states of windows are kept", unit="s", low=1, high=86400
    )
    cache_retention_max_s: float = setting(
        2_592_000.0, "longest retention that a request may ask for", unit="s", low=0, high=10**9
    )
    cache_state_bytes: int = setting(
        0, "arena for states; 0: an eighth of it", unit="bytes", low=0, high=2**48
    )
    cache_tenant_bytes: int = setting(
        0, "arena for kept blocks of one tenant; 0: no limit", unit="bytes", low=0, high=2**48
    )
    cache_min_prefix_blocks: int = setting(
        0, "shorter prompts are not kept", unit="blocks", low=0, high=2**20
    )
    cache_keep_batch: bool = setting(True, "keep blocks of batches while there is room")
    cache_second_sight: bool = setting(False, "keep a block when it is computed a second time")

    cache_fetch_by_layers: bool = setting(
        True, "let an idle engine compute behind the first layers of cached blocks"
    )
    cache_store_once: bool = setting(False, "do not keep what another cache of the cluster keeps")
    cache_dir: str = setting("", "folder of the KV file tier, local or shared; empty: no file tier")
    cache_dir_bytes: int = setting(
        2**34, "size of the KV file tier", unit="bytes", low=2**20, high=2**56
    )
    cache_dir_tenant_bytes: int = setting(
        0, "files of one tenant's kept blocks; 0: no limit", unit="bytes", low=0, high=2**56
    )
    cache_dir_writer: str = setting(
        "local", "name of this cache in cache_dir; its own for each that shares the folder"
    )
    cache_dir_shared: bool = setting(False, "read what other writers left in cache_dir")
    cache_dir_compress: bool = setting(False, "compress blocks in files")
    cache_dir_encrypt: bool = setting(False, "encrypt blocks in files with the cluster key")

    cache_exchange_dir: str = setting(
        "", "folder of exported prefixes and those to import; empty: <run_dir>/exchange"
    )

    router_index_blocks: int = setting(
        2**22,
        "KV blocks that a router knows the holders of; about 75 bytes each",
        unit="blocks",
        low=1024,
        high=2**28,
    )

    # Batching and bounds
    max_num_seqs: int = setting(64, "sequences in a step", low=1, high=65536)
    max_num_batched_tokens: int = setting(
        512, "rows in a step, and the longest prefill chunk", unit="tokens", low=16, high=2**20
    )
    max_stall_ms: float = setting(
        80.0,
        "for which a prompt may hold up answers that run, at a step; CPU engines; 0: any time",
        unit="ms",
        low=0,
        high=60000,
    )
    max_queue: int = setting(256, "requests waiting for an engine", low=1, high=2**20)
    max_tenant_requests: int = setting(
        0, "open requests of one tenant, if its keys say nothing; 0: no limit", low=0, high=2**20
    )
    tenant_requests_per_min: int = setting(
        0, "requests of one tenant, if its keys say nothing; 0: no limit", low=0, high=2**20
    )
    tenant_tokens_per_min: int = setting(
        0,
        "tokens of one tenant, if its keys say nothing; 0: no limit",
        unit="tokens",
        low=0,
        high=2**40,
    )
    max_open_requests: int = setting(
        1024, "requests open in a gateway; above it 429", low=1, high=2**20
    )
    warm_grammars: str = setting(
        "", "file of grammars compiled at the start, a line of JSON {kind, text} each"
    )
    grammar_strictness: str = setting(
        "strict",
        "what of a schema cannot be enforced, where a request does not say: refused, or let go and told",
        choices=("strict", "lenient"),
    )
    encode_cache_mb: int = setting(
        8, "encoded prompts that a gateway remembers; 0: none", unit="MB", low=0, high=2**16
    )
    keep_alive_s: float = setting(
        5.0, "between comments on a stream that waits", unit="s", low=0.1, high=300
    )
    request_timeout_s: float = setting(
        600.0, "longest life of a request", unit="s", low=0.1, high=86400
    )
    heartbeat_ms: int = setting(
        250, "between signs of life on a token stream", unit="ms", low=20, high=60000
    )
    lease_ttl_s: float = setting(3.0, "life of a registry entry", unit="s", low=1, high=300)
    drain_timeout_s: float = setting(
        30.0, "for open work when stopping", unit="s", low=0, high=3600
    )
    drain_grace_s: float = setting(
        3.0,
        "for which an engine that stops goes on with its answers; then they go on elsewhere",
        unit="s",
        low=0,
        high=3600,
    )
    replace_wait_s: float = setting(
        30.0, "for another engine, when the one of a request is lost", unit="s", low=0, high=3600
    )
    hang_timeout_s: float = setting(
        10.0,
        "without an answer, after which the supervisor replaces a service; 0: never",
        unit="s",
        low=0,
        high=3600,
    )

    # Usage
    usage_file: str = setting("", "usage of tenants, by hour; empty: <run_dir>/usage.sqlite")
    usage_retention_days: int = setting(
        400, "for which usage is kept", unit="days", low=1, high=36500
    )

    # Stored responses and conversations
    store_path: str = setting(
        "", "file of stored responses; empty: <run_dir>/responses.sqlite; gateways may share it"
    )
    store_retention_days: int = setting(
        30, "for which responses and conversations are kept", unit="days", low=1, high=36500
    )
    store_tenant_values: int = setting(
        10_000, "responses and conversations kept of one tenant", low=1, high=2**31
    )
    store_tenant_bytes: int = setting(
        2**30, "size of what is kept of one tenant", unit="bytes", low=2**20, high=2**48
    )
    store_max_bytes: int = setting(
        8 * 2**30, "size of the file of stored responses", unit="bytes", low=2**22, high=2**48
    )

    # Telemetry
    log_level: str = setting(
        "info", "least level logged", choices=("debug", "info", "warning", "error")
    )
    trace_sample: float = setting(1.0, "share of requests traced", low=0, high=1)
    trace_file_bytes: int = setting(
        16 * 2**20, "span file size before it is rotated", unit="bytes", low=4096, high=2**40
    )
    otlp_endpoint: str = setting("", "OTLP/HTTP collector", env=("OTEL_EXPORTER_OTLP_ENDPOINT",))


def settings() -> dict[str, tuple["dataclasses.Field[Any]", Setting]]:
    """Every field by name with what is known about it, in order of declaration."""
    return {f.name: (f, f.metadata["setting"]) for f in dataclasses.fields(StackConfig)}


def load(
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[StackConfig, dict[str, str]]:
    """Merge the sources; return the settings and, by name, where each value came from.

    `file` None: the file that `FINBACK_CONFIG` names, if any. Overrides that are None count as not
    given. Relative folders are made absolute.
    """
    env = os.environ if env is None else env
    file = file or env.get("FINBACK_CONFIG") or None
    values: dict[str, Any] = {}
    known, kinds = settings(), typing.get_type_hints(StackConfig)
    sources = dict.fromkeys(known, "default")
    layers = [_from_env(env), _from_overrides(overrides or {})]
    if file is not None:
        layers.insert(0, _from_file(Path(file)))
    for layer in layers:
        for name, (value, source) in layer.items():
            told = known[name][1]
            values[name] = parse(name, value, kinds[name], told, source)
            sources[name] = source
    return _derive(StackConfig(**values), env, sources), sources


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from None
    for name in raw:
        _check_known(name, name, str(path))
    return {name: (value, str(path)) for name, value in raw.items()}


def _from_env(env: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for name, (_, told) in settings().items():
        for key in told.env:
            if env.get(key):
                found[name] = (env[key], key)
    for key, value in env.items():
        if key.startswith(ENV_PREFIX) and key not in NOT_SETTINGS:
            name = key.removeprefix(ENV_PREFIX).lower()
            _check_known(name, key, "the environment")
            found[name] = (value, key)
    return found


def _from_overrides(overrides: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    for name in overrides:
        _check_known(name, name, "the command line")
    return {name: (value, "command line") for name, value in overrides.items() if value is not None}


def _check_known(name: str, shown: str, source: str) -> None:
    known = settings()
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    if not near:
        raise ConfigError(f"unknown setting {shown} in {source}; see `finback config`")
    as_env = shown.startswith(ENV_PREFIX)
    hint = ENV_PREFIX + near[0].upper() if as_env else near[0]
    raise ConfigError(f"unknown setting {shown} in {source}; did you mean {hint}?")


def _derive(config: StackConfig, env: Mapping[str, str], sources: dict[str, str]) -> StackConfig:
    """Fill in what follows from other settings, so that nobody else has to know how."""
    run_dir = Path(config.run_dir).expanduser().absolute()
    derived: dict[str, Any] = {}
    if not config.shm_dir:
        derived["shm_dir"] = "/dev/shm/finback" if _is_tmpfs("/dev/shm") else str(run_dir / "shm")
    if not config.trace_dir:
        derived["trace_dir"] = str(run_dir / "traces")
    if not config.log_dir:
        derived["log_dir"] = str(run_dir / "logs")
    if not config.stack_id:
        derived["stack_id"] = hashlib.blake2b(bytes(run_dir), digest_size=4).hexdigest()
    if not config.model_name:
        is_embedded = config.model == "embedded"
        derived["model_name"] = EMBEDDED_NAME if is_embedded else Path(config.model).stem
    sources.update(dict.fromkeys(derived, "derived"))
    return dataclasses.replace(config, run_dir=str(run_dir), **derived)


def _is_tmpfs(path: str) -> bool:
    """Whether `path` is a writable memory file system (by what the kernel says, not by name)."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    kinds = {parts[1]: parts[2] for line in mounts.splitlines() if len(parts := line.split()) > 2}
    return kinds.get(path) == "tmpfs" and os.access(path, os.W_OK)
