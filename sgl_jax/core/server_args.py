"""One frozen dataclass holds every setting; its field metadata makes the command line."""

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def _arg(
    default: Any,
    help: str,
    choices: Sequence[str] | None = None,
    *,
    env: str | None = None,
    secret: bool = False,
) -> Any:
    """`env` names the environment variable that gives the flag's default, where there is one; a
    secret is never shown."""
    metadata = {"help": help, "choices": choices, "env": env, "secret": secret}
    return field(default=default, metadata=metadata)


# Inclusive. The upper ones are far beyond what works well: they catch slips of the keyboard.
_BOUNDS = {
    "tp_size": (1, 4096),
    "dp_size": (1, 4096),
    "page_size": (0, 4096),
    "mem_fraction_static": (0.05, 0.98),
    "max_running_requests": (0, 65536),
    "max_queued_requests": (1, 10_000_000),
    "session_memory_fraction": (0.0, 1.0),
    "max_sessions": (1, 1_000_000),
    "max_session_tokens": (1, 1_000_000_000_000),
    "chunked_prefill_size": (0, 1_048_576),
    "schedule_conservativeness": (0.0, 10.0),
    "priority_scheduling_preemption_threshold": (0, 2**31 - 1),
    "port": (0, 65535),  # 0 takes any free one
    "max_connections": (1, 1_000_000),
    "max_body_bytes": (1024, 2**31 - 1),
    "receive_timeout": (0.1, 86400.0),
    "keep_alive_timeout": (0.1, 86400.0),
    "decode_log_interval": (0, 1_000_000_000),
    "watchdog_timeout": (1.0, 86400.0),
    "engine_heartbeat_timeout": (2.0, 86400.0),
    "drain_timeout": (0.0, 86400.0),
    "waiting_timeout": (0.0, 1e9),
    "request_timeout": (0.0, 1e9),
    "speculative_num_draft_tokens": (1, 32),
    "test_retract_interval": (1, 1_000_000),
    "test_retract_no_prefill_bs": (0, 65536),
}


@dataclass(frozen=True)
class ServerArgs:
    """Settings of one server. Flag names follow SGLang: `--max-total-tokens` and so on."""

    # Model
    model_path: str = _arg("", "folder of the model in Hugging Face or orbax layout")
    tokenizer_path: str | None = _arg(None, "folder of the tokenizer, if not the model's")
    served_model_name: str | None = _arg(None, "name in the OpenAI API; default: the folder's")
    load_format: str = _arg(
        "auto", "where weights come from", ("auto", "safetensors", "orbax", "dummy")
    )
    check_weights: str = _arg(
        "sample",
        "which weights must be finite numbers for the model to be served",
        ("sample", "all"),
    )
    dtype: str = _arg(
        "auto",
        "of weights and activations; auto is float32 on CPU, else bfloat16",
        ("auto", "float32", "bfloat16"),
    )
    kv_cache_dtype: str = _arg(
        "auto", "auto follows --dtype", ("auto", "float32", "bfloat16", "fp8_e4m3")
    )
    kv_cache_scales: str | None = _arg(
        None, "file of scales for fp8_e4m3, by scripts/calibrate_kv_scales; default: all are 1"
    )
    context_length: int | None = _arg(None, "tokens per request; default: the model's own limit")
    chat_template: str | None = _arg(None, "file with a chat template, if not the tokenizer's")

    # Devices
    device: str = _arg("auto", "where to run", ("auto", "cpu", "tpu", "gpu"))
    tp_size: int = _arg(1, "chips of one data-parallel rank (tensor parallelism)")
    dp_size: int = _arg(1, "data-parallel ranks; devices used = dp x tp")
    weight_sharding: str = _arg(
        "replicated",
        "whether each rank holds all weights or gathers them layer by layer",
        ("replicated", "data"),
    )
    attention_backend: str = _arg(
        "auto",
        "the TPU's kernel, simulated on a CPU, or XLA everywhere; auto is pallas on TPU, else xla",
        ("auto", "pallas", "xla"),
    )

    # Memory
    page_size: int = _arg(0, "tokens per KV page; 0: 128 on a TPU, 16 elsewhere")
    mem_fraction_static: float = _arg(0.85, "share of device memory for weights and KV pages")
    max_total_tokens: int | None = _arg(
        None, "KV tokens per rank, instead of --mem-fraction-static"
    )
    disable_radix_cache: bool = _arg(False, "keep no prefixes between requests")
    radix_eviction_policy: str = _arg(
        "adaptive",
        "which prefixes leave first: least likely to be used again, or least recently used",
        ("adaptive", "lru"),
    )

    # Scheduling
    max_running_requests: int = _arg(
        0, "requests running at once over all ranks, and sessions kept in place; 0: by device"
    )
    max_queued_requests: int = _arg(2048, "waiting requests beyond which new ones get a 503")
    chunked_prefill_size: int = _arg(
        0, "prompt tokens per step and rank at most, beside decode tokens; 0: by device"
    )
    schedule_policy: str = _arg(
        "lpm",
        "which waiting request that fits is tried first: first come, or longest cached prefix",
        ("fcfs", "lpm"),
    )
    schedule_conservativeness: float = _arg(1.0, "above 1 admits later and retracts less")
    enable_priority_scheduling: bool = _arg(
        False, "heed the priority of requests: larger values are more important"
    )
    schedule_low_priority_values_first: bool = _arg(
        False, "with --enable-priority-scheduling, smaller values are more important"
    )
    priority_scheduling_preemption_threshold: int = _arg(
        10, "with it, a request is retracted only for one that is more important by more than this"
    )
    load_balance_method: str = _arg(
        "prefix_aware",
        "which rank gets a request: the one where it costs least, or each in turn",
        ("prefix_aware", "round_robin"),
    )
    disable_overlap_schedule: bool = _arg(False, "read each step's result before the next launch")
    waiting_timeout: float = _arg(0.0, "seconds a request may wait to start; 0: no limit")
    request_timeout: float = _arg(0.0, "seconds from arrival to the last token; 0: no limit")
    random_seed: int = _arg(0, "of everything random, and of dummy weights")

    # Sessions
    session_memory_fraction: float = _arg(
        0.8, "share of a rank's KV pages that idle sessions may hold"
    )
    max_sessions: int = _arg(4096, "sessions that may be open; more are refused with a 503")
    max_session_tokens: int = _arg(
        67_108_864,
        "tokens of history kept for all sessions together; more are refused with a 503",
    )

    # Speculative decoding
    speculative_algorithm: str = _arg(
        "none", "NGRAM drafts tokens that followed the same words before", ("none", "NGRAM")
    )
    speculative_num_draft_tokens: int = _arg(4, "tokens drafted per request and step")

    # Proof
    check_memory: str = _arg(
        "idle", "when the ledger of every rank is proved", ("off", "idle", "busy")
    )
    memory_error_action: str = _arg(
        "repair",
        "when it does not balance: end, or fail what runs, flush and go on",
        ("crash", "repair"),
    )
    memory_dump_dir: str | None = _arg(
        None, "folder for the dump of a rank whose ledger does not balance; default: temporary"
    )
    test_retract: bool = _arg(
        False,
        "for tests: retract half of the running requests every few steps though memory suffices",
        env="SGLANG_TEST_RETRACT",
    )
    test_retract_interval: int = _arg(
        3, "steps from one forced retract to the next", env="SGLANG_TEST_RETRACT_INTERVAL"
    )
    test_retract_no_prefill_bs: int = _arg(
        0,
        "with --test-retract, start nothing while more requests run than this; 0: no bound",
        env="SGLANG_TEST_RETRACT_NO_PREFILL_BS",
    )
    record_events: str | None = _arg(
        None, "file for the scheduler's events, to run again with python -m sgl_jax.replay"
    )

    # HTTP
    host: str = _arg("127.0.0.1", "address to listen on")
    port: int = _arg(30000, "port to listen on")
    api_key: str | None = _arg(
        None,
        "key that clients must send as a bearer token; other users of the machine can read it",
        env="SGL_JAX_API_KEY",
        secret=True,
    )
    api_key_file: str | None = _arg(None, "file of such keys, a line each: KEY or NAME KEY")
    admin_api_key: str | None = _arg(
        None,
        "key that the routes of the operator ask for, instead of those above",
        env="SGL_JAX_ADMIN_API_KEY",
        secret=True,
    )
    admin_api_key_file: str | None = _arg(None, "file of such keys, as --api-key-file")
    cors_allow_origins: str | None = _arg(
        None, "web origins whose pages may call this server, with commas between them, or *"
    )
    max_connections: int = _arg(4096, "connections open at once; more are answered 503")
    max_body_bytes: int = _arg(33_554_432, "bytes of a request's body")
    receive_timeout: float = _arg(60.0, "seconds in which a request must have arrived")
    keep_alive_timeout: float = _arg(
        120.0, "seconds without a request after which a connection is closed"
    )
    incremental_streaming_output: bool = _arg(
        False, "events of a streamed /generate have only what is new, instead of all so far"
    )
    log_level: str = _arg("info", "how much to log", ("debug", "info", "warning", "error"))
    log_requests: bool = _arg(False, "log each request's arrival and end")
    decode_log_interval: int = _arg(100, "steps between two lines of statistics; 0: none")
    watchdog_timeout: float = _arg(300.0, "seconds a step may take before the engine gives up")
    engine_heartbeat_timeout: float = _arg(
        20.0, "seconds the engine's process may be silent before /health and new requests get a 503"
    )
    drain_timeout: float = _arg(60.0, "seconds that running requests get to finish after SIGTERM")

    # Start-up
    skip_warmup: bool = _arg(False, "compile on first use instead of before ready")
    compilation_cache_dir: str | None = _arg(
        None, "default: a private folder of this user; 'none' switches it off"
    )

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:  # nor NaN
                raise ValueError(f"{_flag(name)} must be in [{low}, {high}], got {value}")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"--page-size must be a power of two, got {self.page_size}")
        for name in ("max_total_tokens", "context_length"):
            value = getattr(self, name)
            if value is not None and value < max(1, self.page_size):
                least = f"one page of {self.page_size} tokens" if self.page_size else "1"
                raise ValueError(f"{_flag(name)} must be at least {least}, got {value}")
        if self.kv_cache_scales is not None and self.kv_cache_dtype != "fp8_e4m3":
            raise ValueError(
                f"--kv-cache-scales needs --kv-cache-dtype fp8_e4m3, got {self.kv_cache_dtype}"
            )
        if self.schedule_low_priority_values_first and not self.enable_priority_scheduling:
            raise ValueError(
                "--schedule-low-priority-values-first needs --enable-priority-scheduling"
            )
        for name in ("api_key", "admin_api_key"):
            key = getattr(self, name)
            if key is not None and not key.strip():
                raise ValueError(f"{_flag(name)} is empty: give a key, or leave the flag out")
        for setting in dataclasses.fields(self):
            choices = setting.metadata["choices"]
            if choices and getattr(self, setting.name) not in choices:
                raise ValueError(
                    f"{_flag(setting.name)} must be one of {', '.join(choices)}, "
                    f"got {getattr(self, setting.name)!r}"
                )

    def public(self) -> dict[str, Any]:
        """All settings by name, with `***` in place of secrets."""
        return {
            setting.name: "***" if setting.metadata["secret"] and value is not None else value
            for setting in dataclasses.fields(self)
            for value in (getattr(self, setting.name),)
        }

    @property
    def tokenizer_folder(self) -> str:
        """Where the tokenizer lies."""
        return self.tokenizer_path or self.model_path

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.dp_size * self.tp_size

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted per request and step; 0 without speculative decoding."""
        return 0 if self.speculative_algorithm == "none" else self.speculative_num_draft_tokens


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(
    parser: argparse.ArgumentParser,
    environment: Mapping[str, str] | None = None,
    only: Sequence[str] | None = None,
) -> None:
    """Add one flag per field of `ServerArgs`, or for those in `only`; booleans are switches.

    Args:
        environment: where the variables that fields name (`env`) are looked up; they stand for
            the default of a flag, which wins over them. They concern the command line alone:
            a `ServerArgs` made in Python is what its arguments say.

    Raises:
        ValueError: a variable cannot be read.
    """
    for setting in dataclasses.fields(ServerArgs):
        if only is not None and setting.name not in only:
            continue
        default = _default(setting, environment or {})
        help_text, secret = setting.metadata["help"], setting.metadata["secret"]
        if setting.metadata["env"]:
            help_text += f" [{setting.metadata['env']}]"
        if setting.type is bool:
            # What the environment can switch on, a flag must be able to switch off.
            action = argparse.BooleanOptionalAction if setting.metadata["env"] else "store_true"
            parser.add_argument(_flag(setting.name), action=action, default=default, help=help_text)
            continue
        parser.add_argument(
            _flag(setting.name),
            type=_scalar_type(str(setting.type)),
            default=default,
            choices=setting.metadata["choices"],
            required=setting.name == "model_path",
            metavar=None if setting.metadata["choices"] else "VALUE",
            help=help_text if default in (None, "") or secret else f"{help_text} (%(default)s)",
        )


def _default(setting: "dataclasses.Field[Any]", environment: Mapping[str, str]) -> Any:
    name = setting.metadata["env"]
    text = environment.get(name, "") if name else ""
    if not text:
        if setting.metadata["secret"] and name in environment:
            raise ValueError(f"the environment's {name} is empty: set a key, or unset it")
        return setting.default
    if setting.type is bool:
        return _read_switch(name, text)
    kind = _scalar_type(str(setting.type))
    try:
        return kind(text)
    except ValueError:
        raise ValueError(
            f"the environment's {name} must be {kind.__name__}, got {text!r}"
        ) from None


def _read_switch(name: str, text: str) -> bool:
    on, off = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
    if text.lower() not in on + off:
        raise ValueError(f"the environment's {name} must be 1 or 0, got {text!r}")
    return text.lower() in on


def _scalar_type(annotation: str) -> type:
    for name, kind in (("int", int), ("float", float)):
        if name in annotation:
            return kind
    return str


def parse_server_args(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> ServerArgs:
    """Read the command line, and the environment (by default this process's) where it names no
    value; exits with usage on a bad one, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="sgl-jax", description="Serve a language model over HTTP."
    )
    try:
        add_arguments(parser, os.environ if environment is None else environment)
        return ServerArgs(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
