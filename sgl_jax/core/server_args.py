"""All settings of a server. The scheduler's settings are in `SchedulerArgs`."""

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_jax.core.sampling_params import LOGPROBS_MODES
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.settings import flag, setting

_HOST_PATTERN = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class ServerArgs(SchedulerArgs):
    """Settings of one server. Flag names follow SGLang: `--max-total-tokens` and so on."""

    # Model
    model_path: str = setting(
        "", "folder of the model in Hugging Face or orbax layout, or a GGUF file"
    )
    tokenizer_path: str | None = setting(None, "folder of the tokenizer, if not the model's")
    served_model_name: str | None = setting(None, "name in the OpenAI API; default: the folder's")
    load_format: str = setting(
        "auto", "where weights come from", ("auto", "safetensors", "orbax", "gguf", "dummy")
    )
    check_weights: str = setting(
        "sample",
        "which weights are checked for NaNs and infinities when they are loaded",
        ("sample", "all"),
    )
    weight_version: str = setting("default", "label of the first weights, in answers")
    dtype: str = setting(
        "auto",
        "number format of weights and activations; auto is float32 on CPU, else bfloat16",
        ("auto", "float32", "bfloat16"),
    )
    quantization: str = setting(
        "none",
        "number format that weights are quantized to while they are loaded, if they are floats in "
        "the checkpoint: 8 bits with a scale for each output, 4 with one for 128 inputs of it; "
        "w8a8: activations, too",
        ("none", "int8", "fp8", "int4", "w8a8_int8", "w8a8_fp8"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "number format of cached keys and values; auto follows --dtype",
        ("auto", "float32", "bfloat16", "fp8_e4m3"),
    )
    kv_cache_scales: str | None = setting(
        None, "file of scales for fp8_e4m3, from scripts/calibrate_kv_scales; default: all are 1"
    )
    context_length: int | None = setting(None, "tokens per request; default: the model's limit")
    strict_fields: bool = setting(
        False, "refuse fields of requests that have no effect, too, and hosted tools"
    )
    strict_max_tokens: bool = setting(
        False,
        "refuse requests for more output tokens than the context has room for; default: they get "
        "the room that is left, and the header x-max-tokens-clamped has the number",
    )
    logprobs_mode: str = setting(
        "auto",
        "log-probabilities of the output are the model's (raw), of its distribution after "
        "penalties, grammar and temperature (scaled), or after top-k, top-p and min-p, too "
        "(processed); auto: scaled for /generate, raw for other APIs",
        ("auto", *LOGPROBS_MODES),
    )
    is_embedding: bool = setting(
        False,
        "serve embeddings instead of text; without effect if the model's folder has a modules.json "
        "with pooling of the last token, which is served so in any case",
    )
    rerank_template: str = setting(
        "none",
        "prompt of /v1/rerank; qwen3: Qwen3-Reranker's, and the score of a document is the "
        "probability of yes against no after it",
        ("none", "qwen3"),
    )
    chat_template: str | None = setting(None, "file with a chat template, if not the tokenizer's")
    tool_call_parser: str = setting(
        "auto",
        "format of the model's tool calls; auto: detected from the chat template, if certain",
        (
            *("auto", "none", "hermes", "qwen25", "qwen3_coder", "llama3", "mistral"),
            *("deepseekv3", "kimi_k2", "glm45", "gpt-oss", "gemma", "pythonic"),
        ),
    )
    reasoning_parser: str = setting(
        "auto",
        "format of the model's reasoning; auto: detected from the chat template, if certain",
        ("auto", "none", "qwen3", "deepseek-r1", "gpt-oss", "kimi", "glm45"),
    )

    # Devices
    device: str = setting("auto", "where to run", ("auto", "cpu", "tpu", "gpu"))
    tp_size: int = setting(
        1, "chips of one data-parallel rank (tensor parallelism)", bounds=(1, 4096)
    )
    dp_size: int = setting(1, "data-parallel ranks; devices used = dp x tp", bounds=(1, 4096))
    ep_size: int = setting(
        1,
        "chips across which whole experts are distributed: --tp-size, or dp x tp; 1: the chips of "
        "a rank share each expert",
        bounds=(1, 4096),
    )
    ep_num_redundant_experts: int = setting(
        0,
        "with --ep-size above 1: copies of the most chosen experts that each layer has besides; "
        "--ep-size divides experts and copies",
        bounds=(0, 65536),
    )
    init_expert_location: str = setting(
        "trivial",
        "with --ep-size above 1: file of counts, from /dump_expert_distribution_record, by which "
        "each layer's experts are distributed to level the chips' loads; trivial: in order",
    )
    expert_distribution_recorder_mode: str = setting(
        "none",
        "stat: each step counts how often experts are chosen, for "
        "/start_expert_distribution_record",
        ("none", "stat"),
    )
    enable_return_routed_experts: bool = setting(
        False, "steps report the experts of each token, for return_routed_experts of /generate"
    )
    enable_return_hidden_states: bool = setting(
        False, "steps report the hidden state of each token, for return_hidden_states of /generate"
    )
    enable_multimodal: bool = setting(
        False, "requests may have images, if the model has a vision tower that is supported"
    )
    image_cache_size: float = setting(
        1.0,
        "gigabytes on each rank for the vectors of images, which wait for their prompts or for the "
        "same image in another request",
        bounds=(1e-6, 1e4),
    )
    max_images_per_request: int = setting(
        64, "images of a request, those of its history included", bounds=(1, 1024)
    )
    weight_sharding: str = setting(
        "replicated",
        "each rank holds all weights (replicated), or gathers them layer by layer (data)",
        ("replicated", "data"),
    )
    hidden_sharding: str = setting(
        "replicated",
        "hidden states between layers' products: of all tokens on every chip of a rank "
        "(replicated), or of each chip's share of the tokens (tensor: sequence parallelism)",
        ("replicated", "tensor"),
    )
    attention_backend: str = setting(
        "auto",
        "pallas: the TPU's kernels, simulated on a CPU; xla: XLA programs; auto is pallas on TPU, "
        "else xla",
        ("auto", "pallas", "xla"),
    )
    enable_deterministic_inference: bool = setting(
        False,
        "bit-equal tokens and log-probabilities of a request in any batch, place, chunking, cache "
        "hit or retract, on one mesh: all are computed in blocks of one shape",
    )

    # Hosts
    nnodes: int | None = setting(
        None,
        "hosts that serve as one engine; default: as many as GKE, LeaderWorkerSet or the Cloud TPU "
        "VM names, else 1",
        bounds=(1, 1024),
    )
    node_rank: int | None = setting(
        None, "this host's place among them; host 0 takes requests", bounds=(0, 1023)
    )
    dist_init_addr: str | None = setting(
        None, "HOST:PORT of host 0 for the other hosts; the next port is taken, too"
    )
    host_key: str | None = setting(
        None,
        "secret that the hosts of one engine share; other users of the machine can read it",
        env="SGL_JAX_HOST_KEY",
        secret=True,
    )
    host_key_file: str | None = setting(None, "file with that secret")
    dist_timeout: float = setting(
        300.0, "seconds in which all hosts must have started", bounds=(1.0, 86400.0)
    )
    host_timeout: float = setting(
        10.0, "seconds of silence after which a host counts as lost", bounds=(1.0, 3600.0)
    )

    # Memory
    page_size: int = setting(
        0, "tokens per KV page; 0: 128 on a TPU, 16 elsewhere", bounds=(0, 4096)
    )
    mem_fraction_static: float = setting(
        0.85, "share of device memory for weights and KV pages", bounds=(0.05, 0.98)
    )
    max_total_tokens: int | None = setting(
        None, "tokens in the KV pool of a rank, instead of --mem-fraction-static"
    )
    enable_hierarchical_cache: bool = setting(
        False, "keep prefixes in host memory, too, and fetch them from there"
    )
    hicache_ratio: float = setting(
        2.0,
        "with --enable-hierarchical-cache, host memory for prefixes, relative to the pools "
        "on the devices",
        bounds=(0.01, 1000.0),
    )
    hicache_size: float = setting(
        0.0,
        "the same in gigabytes for each rank, instead of --hicache-ratio; 0: by the ratio",
        bounds=(0.0, 1e6),
    )
    hicache_storage_dir: str | None = setting(
        None,
        "the folder of --hicache-storage-backend file, which may hold an earlier run's blocks; "
        "default: blocks in --restore-cache",
    )
    hicache_storage_size: float = setting(
        100.0, "gigabytes in that folder at most, of all engines that use it", bounds=(0.001, 1e6)
    )
    hicache_storage_prefetch_timeout: float = setting(
        2.0,
        "seconds after which a prefix from the store is used as far as it has arrived, with "
        "--hicache-storage-prefetch-policy timeout",
        bounds=(0.0, 3600.0),
    )
    hicache_storage_backend_extra_config: str | None = setting(
        None, "settings of Mooncake's client as a JSON object, such as master_server_address"
    )
    restore_cache: str | None = setting(
        None,
        "with --hicache-storage-backend, a folder where the open sessions and the list of prefixes "
        "are saved, and from which they are restored at the start",
    )
    save_cache_interval: float = setting(
        10.0,
        "minutes between two saves to --restore-cache; 0: only at the end and on /save_cache",
        bounds=(0.0, 1e6),
    )
    swa_full_tokens_ratio: float | None = setting(
        None,
        "size of the KV pool of sliding-window layers, relative to the other layers' pool, where "
        "they have separate pools; default: the windows of all running requests, and a share for "
        "cached ones",
        bounds=(0.001, 1.0),
    )
    recurrent_state_dtype: str = setting(
        "float32", "number format of recurrent layers' states", ("float32", "bfloat16")
    )
    recurrent_snapshot_interval: int | None = setting(
        None,
        "tokens between the recurrent states that the prefix cache keeps of a prompt, besides its "
        "end and its branch points; default: the states take no more memory than the prompt's KV",
        bounds=(1, 1 << 20),
    )
    max_recurrent_snapshots: int | None = setting(
        None,
        "recurrent states that the prefix cache of a rank may keep; default: as many as take 3/4 "
        "of the bytes of KV",
        bounds=(1, 1 << 20),
    )

    # Scheduling
    max_running_requests: int = setting(
        0,
        "requests running at once over all ranks, idle sessions with KV in place included; 0: by "
        "device",
        bounds=(0, 65536),
    )
    chunked_prefill_size: int = setting(
        0,
        "prompt tokens per step and rank at most, besides decode tokens; 0: by device",
        bounds=(0, 1_048_576),
    )
    disable_overlap_schedule: bool = setting(
        False, "read the result of each step before the next is launched"
    )
    num_decode_steps: str = setting(
        "1",
        "decode steps in one launch at most, while no request waits, prefills or has a grammar; "
        "auto: as many as delay a new prompt by at most 20 ms, or one. It is 1 with drafts, "
        "recurrent layers or several hosts",
        ("auto", "1", "2", "4", "8", "16", "32"),
    )

    # Speculative decoding
    speculative_algorithm: str = setting(
        "none",
        "NGRAM drafts the tokens that followed an earlier occurrence of the last tokens; MTP (or "
        "NEXTN) drafts by the model's own layer for it, EAGLE3 by a layer of another checkpoint",
        ("none", "NGRAM", "MTP", "NEXTN", "EAGLE3"),
    )
    speculative_draft_model_path: str | None = setting(
        None, "folder of the EAGLE-3 head: config.json and safetensors"
    )
    speculative_num_draft_tokens: int = setting(
        4, "tokens drafted per request and step", bounds=(1, 32)
    )

    # Proof
    memory_error_action: str = setting(
        "repair",
        "after a defect of the page ledger: end the engine (crash), or fail all requests, empty "
        "the caches and continue (repair)",
        ("crash", "repair"),
    )
    memory_dump_dir: str | None = setting(
        None, "folder for memory dumps after a defect of the ledger; default: a temporary one"
    )
    record_events: str | None = setting(
        None, "file for the scheduler's events, to be replayed with python -m sgl_jax.replay"
    )

    # HTTP
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(30000, "port to listen on", bounds=(0, 65535))
    api_key: str | None = setting(
        None,
        "key that clients must send as a bearer token; other users of the machine can read it",
        env="SGL_JAX_API_KEY",
        secret=True,
    )
    api_key_file: str | None = setting(
        None, "file of such keys, one per line: KEY, or NAME KEY and the limits of its tenant"
    )
    admin_api_key: str | None = setting(
        None,
        "key that the operator's routes require, instead of --api-key",
        env="SGL_JAX_ADMIN_API_KEY",
        secret=True,
    )
    admin_api_key_file: str | None = setting(None, "file of such keys, as --api-key-file")
    open_metrics: bool = setting(False, "/metrics needs no key: for scrapers that cannot send one")
    isolate_tenants: bool = setting(
        False,
        "tenants share no cached prefixes: each has its own namespaces, in all caches and stores",
    )
    cors_allow_origins: str | None = setting(
        None, "web origins whose pages may call this server, separated by commas, or *"
    )
    allowed_hosts: str | None = setting(
        None,
        "without keys: names of this server, as clients write them in URLs, besides addresses, "
        "localhost and --host, separated by commas; *.example.com: all below, *: any",
    )
    allowed_media_domains: str | None = setting(
        None,
        "domains from which images of requests are fetched, separated by commas, with :PORT if it "
        "is not the usual one; others, and redirects, are refused",
    )
    max_connections: int = setting(
        4096, "connections open at once; further ones get a 503", bounds=(1, 1_000_000)
    )
    max_body_bytes: int = setting(33_554_432, "bytes of a request's body", bounds=(1024, 2**31 - 1))
    receive_timeout: float = setting(
        60.0, "seconds within which a request must arrive in full", bounds=(0.1, 86400.0)
    )
    keep_alive_timeout: float = setting(
        120.0, "seconds without a request after which a connection is closed", bounds=(0.1, 86400.0)
    )
    incremental_streaming_output: bool = setting(
        False, "events of a streamed /generate have only the new output, instead of all so far"
    )
    log_level: str = setting("info", "how much to log", ("debug", "info", "warning", "error"))
    open_json_objects: bool = setting(
        False,
        "objects of JSON schemas may have properties that these do not name, as by the standard",
    )
    kv_events_config: str | None = setting(
        None,
        "JSON: publish the cached blocks for routers, in the format of vLLM and SGLang "
        '({"endpoint": "tcp://127.0.0.1:5557"})',
    )
    log_format: str = setting("text", "log lines as text or as JSON objects", ("text", "json"))
    log_requests: bool = setting(False, "log each request's arrival and end")
    disable_access_log: bool = setting(False, "log no line for each HTTP request")
    memory_view_text: bool = setting(
        False, "the memory view shows the text of prompts and of cached prefixes"
    )
    enable_trace: bool = setting(
        False, "trace each request with OpenTelemetry; needs the extra `trace`"
    )
    otlp_traces_endpoint: str = setting(
        "localhost:4317",
        "with --enable-trace, HOST:PORT of the collector, for OTLP over gRPC; https://HOST:PORT "
        "for TLS",
    )
    enable_metrics: bool = setting(False, "accepted for SGLang's sake: metrics are always there")
    decode_log_interval: int = setting(
        100, "steps between two log lines of statistics; 0: none", bounds=(0, 1_000_000_000)
    )
    watchdog_timeout: float = setting(
        300.0, "seconds a step may take before the engine ends itself", bounds=(1.0, 86400.0)
    )
    max_step_failures: int = setting(
        20,
        "steps in a row that may fail on the device before the engine ends itself, with exit code "
        "72; from 3 on, /health is 503",
        bounds=(1, 1_000_000_000),
    )
    engine_heartbeat_timeout: float = setting(
        20.0,
        "seconds the engine's process may be silent before /health and new requests get a 503",
        bounds=(2.0, 86400.0),
    )
    drain_timeout: float = setting(
        60.0, "seconds that running requests get to finish after SIGTERM", bounds=(0.0, 86400.0)
    )

    # Start-up
    warmup: str = setting(
        "auto",
        "programs compiled before the server is ready: all; staged: two, to whose shapes all steps "
        "without structured output are padded, and the rest in the background; plain: all except "
        "those of structured output; none: each is compiled when first needed; auto: staged on one "
        "host, plain on several",
        ("auto", "all", "staged", "plain", "none"),
    )
    compilation_cache_dir: str | None = setting(
        None,
        "folder for compiled programs; default: a private folder of this user; 'none': no cache",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"--page-size must be a power of two, got {self.page_size}")
        ep_sizes = sorted({1, self.tp_size, self.num_devices})
        if self.ep_size not in ep_sizes:
            raise ValueError(
                f"--ep-size must be one of {', '.join(map(str, ep_sizes))} (1, --tp-size, dp x tp),"
                f" got {self.ep_size}"
            )
        if self.ep_size == 1 and self.places_experts:
            raise ValueError(
                "--ep-num-redundant-experts and --init-expert-location need --ep-size above 1"
            )
        for name in ("max_total_tokens", "context_length"):
            value = getattr(self, name)
            if value is not None and value < max(1, self.page_size):
                least = f"one page of {self.page_size} tokens" if self.page_size else "1"
                raise ValueError(f"{flag(name)} must be at least {least}, got {value}")
        if self.kv_cache_scales is not None and self.kv_cache_dtype != "fp8_e4m3":
            raise ValueError(
                f"--kv-cache-scales needs --kv-cache-dtype fp8_e4m3, got {self.kv_cache_dtype}"
            )
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ValueError(
                "--enable-hierarchical-cache needs the prefix cache: no --disable-radix-cache"
            )
        self._check_storage()
        is_eagle3 = self.speculative_algorithm == "EAGLE3"
        if is_eagle3 != bool(self.speculative_draft_model_path):
            raise ValueError(
                "--speculative-algorithm EAGLE3 and --speculative-draft-model-path need each other"
            )
        if self.num_devices % self.num_hosts:
            raise ValueError(
                f"--dp-size {self.dp_size} x --tp-size {self.tp_size} must be a multiple of "
                f"--nnodes {self.nnodes}: each host has as many devices"
            )
        for name in () if self.allowed_hosts is None else self.allowed_hosts.split(","):
            if not _HOST_PATTERN.fullmatch(name.strip()):
                raise ValueError(
                    "--allowed-hosts takes names without schemes and ports, separated by commas, "
                    f"such as llm.example.com, *.example.com or *, got {name.strip()!r}"
                )
        for name in ("api_key", "admin_api_key", "host_key"):
            key = getattr(self, name)
            if key is not None and not key.strip():
                raise ValueError(f"{flag(name)} is empty: give a key, or leave the flag out")

    def _check_storage(self) -> None:
        backend = self.hicache_storage_backend
        if backend == "none":
            if self.restore_cache is not None:
                raise ValueError(
                    "--restore-cache needs --hicache-storage-backend: the store keeps the pages"
                )
            return
        if self.restore_cache is not None and self.hicache_write_policy != "write_through":
            raise ValueError(
                "--restore-cache needs --hicache-write-policy write_through, got "
                f"{self.hicache_write_policy}"
            )
        if not self.enable_hierarchical_cache:
            raise ValueError(
                f"--hicache-storage-backend {backend} needs --enable-hierarchical-cache: the store "
                "is behind host memory"
            )
        if self.num_hosts > 1:
            raise ValueError(
                f"--hicache-storage-backend {backend} serves engines on one host, not "
                f"--nnodes {self.num_hosts}"
            )
        if backend == "file" and self.storage_folder is None:
            raise ValueError(
                "--hicache-storage-backend file needs --hicache-storage-dir, or --restore-cache"
            )
        try:
            is_object = isinstance(
                json.loads(self.hicache_storage_backend_extra_config or "{}"), dict
            )
        except ValueError:
            is_object = False
        if not is_object:
            raise ValueError("--hicache-storage-backend-extra-config must be a JSON object")

    @property
    def store_timeout_s(self) -> float | None:
        """Return the maximum seconds that a request waits for the store; None: until its prefix
        arrives."""
        is_timed = self.hicache_storage_prefetch_policy == "timeout"
        return self.hicache_storage_prefetch_timeout if is_timed else None

    @property
    def storage_folder(self) -> Path | None:
        if self.hicache_storage_dir is None:
            return None if self.restore_cache is None else Path(self.restore_cache) / "blocks"
        return Path(self.hicache_storage_dir)

    def public(self) -> dict[str, Any]:
        """Return all settings by name, with `***` in place of secrets."""
        return {
            field.name: "***" if field.metadata["secret"] and value is not None else value
            for field in dataclasses.fields(self)
            for value in (getattr(self, field.name),)
        }

    @property
    def has_key_file(self) -> bool:
        """Return True if keys come from a file, in which each key is a tenant."""
        return self.api_key_file is not None or self.admin_api_key_file is not None

    @property
    def has_tenants(self) -> bool:
        return super().has_tenants or self.has_key_file

    @property
    def model_name(self) -> str:
        """Return the model's name in the OpenAI API and in metrics."""
        return self.served_model_name or Path(self.model_path).resolve().name

    @property
    def tokenizer_folder(self) -> str:
        return self.tokenizer_path or self.model_path

    @property
    def num_devices(self) -> int:
        return self.dp_size * self.tp_size

    @property
    def num_hosts(self) -> int:
        """Return `nnodes`; 1 until `multihost.group` has read the platform, if not set."""
        return self.nnodes or 1

    @property
    def num_host_devices(self) -> int:
        return self.num_devices // self.num_hosts

    @property
    def reports_token_values(self) -> bool:
        """Return True if steps report values of tokens: see `token_values.py`."""
        return self.enable_return_routed_experts or self.enable_return_hidden_states

    @property
    def places_experts(self) -> bool:
        """Return True unless experts are distributed in order, each to one chip."""
        return self.ep_num_redundant_experts > 0 or self.init_expert_location != "trivial"

    @property
    def has_draft_layer(self) -> bool:
        return self.speculative_algorithm in ("MTP", "NEXTN", "EAGLE3")

    @property
    def num_draft_tokens(self) -> int:
        """Return the tokens drafted per request and step; 0 without speculative decoding."""
        return 0 if self.speculative_algorithm == "none" else self.speculative_num_draft_tokens
