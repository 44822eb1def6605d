"""`sgl-jax doctor` names a kernel that computes wrong numbers, and passes kernels that do not."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

import sgl_jax.planner
from sgl_jax.doctor.__main__ import main
from sgl_jax.kernels.expert_dispatch.interface import DispatchKernels
from sgl_jax.layers.kernels import calls_of, kernels_from, kernels_of
from tests.models.golden_server import GOLDEN

PUBLISHED = Path(sgl_jax.planner.__file__).parent / "models"
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
DISPATCH = [f"expert_dispatch.{name}" for name in DispatchKernels._fields]
# Models that use every kernel: a published config, made small, or a folder; flags; kernels.
MODELS = {
    "quantized": (
        "qwen3-8b",
        ["--quantization", "int8"],
        ["attend", "qkv_heads", "multiply_quantized"],
    ),
    "experts": ("qwen3-30b-a3b", [], ["multiply_groups", *DISPATCH]),
    "latents": (GOLDEN / "deepseek_v3", ["--load-format", "auto"], ["attend_latents"]),
    "states": ("qwen3-next-80b-a3b", [], ["gated_delta", "causal_conv"]),
    "state spaces": ("nemotron-h-8b", [], ["state_space"]),
}
CASES = [(model, kernel) for model, (*_, kernels) in MODELS.items() for kernel in kernels]
BY_DEFAULT = [("quantized", "multiply_quantized")]


@pytest.fixture
def folder(tmp_path):
    """A function of a key of `MODELS`: the folder of the model."""

    def write(name):
        source = MODELS[name][0]
        if isinstance(source, Path):
            return source
        config = json.loads((PUBLISHED / f"{source}.json").read_text())
        config = {key: SMALL.get(key, value) for key, value in config.items()}
        if "full_attention_interval" in config:
            config |= {"num_hidden_layers": 2, "full_attention_interval": 2}
        if "hybrid_override_pattern" in config:
            config |= {"hybrid_override_pattern": "M*"}
        config.pop("layer_types", None)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.fixture
def report(folder, capsys):
    """A function of a key of `MODELS`: the exit code, and the report's section on kernels."""

    def run(name):
        flags = ["--model-path", str(folder(name)), "--load-format", "dummy", "--device", "cpu"]
        flags += ["--attention-backend", "pallas", "--page-size", "16", "--context-length", "128"]
        code = main([*flags, *MODELS[name][1], "--checks", "kernels", "--json"])
        return code, json.loads(capsys.readouterr().out)["sections"]["kernels"]

    return run


def with_fault(name, change):
    """XLA's kernels but for one, simulated: `change` is applied to its first result."""

    def kernels(platform, backend):
        calls = calls_of(kernels_of("gpu", "xla"))
        right = calls_of(kernels_of(platform, backend))[name]

        def wrong(*args, **kwargs):
            found = right(*args, **kwargs)
            if hasattr(found, "shape"):
                return change(found)
            if hasattr(found, "places"):
                return found._replace(places=change(found.places))
            return change(found[0]), *found[1:]

        return kernels_from(calls | {name: wrong})

    return kernels


def rolled(x):
    """The numbers of a neighbour, as if a kernel had read a wrong row."""
    return jnp.roll(x, 1, axis=-1)


@pytest.mark.parametrize(
    ("model", "kernel"),
    [case if case in BY_DEFAULT else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_a_kernel_with_a_fault_is_named(model, kernel, report, monkeypatch):
    monkeypatch.setattr("sgl_jax.executor.engine_config.kernels_of", with_fault(kernel, rolled))
    code, kernels = report(model)
    assert code == 1
    (failure,) = kernels["failures"]
    assert failure.startswith(f"{kernel} ")
    assert "--attention-backend xla" in failure


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_right_kernels_pass(model, report):
    code, kernels = report(model)
    assert (code, kernels["failures"]) == (0, [])
    for name in MODELS[model][2]:
        assert kernels[name]["num_compared"] > 0
        assert not kernels[name]["is_reference"]
