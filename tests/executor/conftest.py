"""A tiny model and executors over it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor import buckets
from sgl_jax.executor.model_executor import ModelExecutor
from tests.support import shared_programs

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.4,
    "eos_token_id": 95,
}


@pytest.fixture(scope="module", autouse=True)
def _shared_programs() -> Iterator[None]:
    with shared_programs.shared_programs():
        yield


@pytest.fixture(scope="module")
def few_shapes() -> Iterator[None]:
    """For modules that test no padding."""
    with shared_programs.few_shapes():
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="session")
def make_args(model_folder: Path) -> Callable[..., ServerArgs]:
    """Arguments for a tiny engine."""
    settings: dict[str, Any] = {
        "model_path": str(model_folder),
        "load_format": "dummy",
        "device": "cpu",
        "page_size": 4,
        "max_total_tokens": 400,
        "max_running_requests": 4,
        "chunked_prefill_size": 8,
        "warmup": "none",
    }
    return lambda **overrides: ServerArgs(**(settings | overrides))


@pytest.fixture(scope="session")
def make_executor(make_args: Callable[..., ServerArgs]) -> Callable[..., ModelExecutor]:
    """Executors by their arguments, made once for all tests of a run; reset before each use."""
    made: dict[str, ModelExecutor] = {}

    def make(**overrides: Any) -> ModelExecutor:
        key = repr((sorted(overrides.items()), buckets._CPU_TOKENS))
        if key not in made:
            made[key] = ModelExecutor(make_args(**overrides))
        made[key].reset()
        return made[key]

    return make
