"""Facts that all hosts of an engine must share, compared before anything is loaded."""

import dataclasses
import hashlib
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.settings import flag

_PACKAGES = ("sgl-jax", "jax", "jaxlib", "libtpu", "numpy", "flax")
_COMPILER_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAX_ENABLE_X64")
# Settings that may differ: file paths, HTTP, logs, and settings used only by host 0.
_OWN_SETTINGS = frozenset(
    "node_rank dist_init_addr host_key host_key_file dist_timeout model_path tokenizer_path "
    "speculative_draft_model_path served_model_name chat_template host port api_key "
    "api_key_file admin_api_key admin_api_key_file cors_allow_origins "
    "max_connections max_body_bytes receive_timeout "
    "keep_alive_timeout log_level log_format log_requests disable_access_log record_events "
    "memory_dump_dir kv_events_config kv_cache_scales enable_trace otlp_traces_endpoint "
    "compilation_cache_dir".split()
)
_CONFIGS = ("config.json", "hf_quant_config.json")
_EDGE_BYTES = 1 << 16
_WEIGHTS = ("*.safetensors", "*.gguf", "orbax_params*/**/*")


def describe_host(args: ServerArgs) -> dict[str, str]:
    """Return facts by name: versions, the compiler's settings, flags, and the model's files."""
    facts = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "absent"
    facts |= {name: os.environ.get(name, "") for name in _COMPILER_SETTINGS}
    for field in dataclasses.fields(args):
        if field.name not in _OWN_SETTINGS:
            facts[flag(field.name)] = str(getattr(args, field.name))
    folders = {"": args.model_path, " of the draft model": args.speculative_draft_model_path}
    for suffix, folder in folders.items():
        if folder:
            for name in _CONFIGS:
                facts[f"{name}{suffix}"] = _digest(Path(folder) / name)
            if args.load_format != "dummy":
                facts[f"weights{suffix}"] = _weights_digest(Path(folder))
    return facts


def differences(own: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return a sentence for each fact of another host that differs from host 0's fact."""
    return [
        f"{name} is {theirs.get(name, 'absent')!r} there and {own.get(name, 'absent')!r} on host 0"
        for name in sorted(own.keys() | theirs.keys())
        if own.get(name) != theirs.get(name)
    ]


def _weights_digest(folder: Path) -> str:
    """Hash the names, sizes and both ends of all files, since reading whole files takes minutes."""
    digest = hashlib.sha256()
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern) if path.is_file())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(0, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()[:16]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "absent"
