"""Drafts of EAGLE-3 heads: a plain layer's, whatever the mesh; they change no token."""

import re
from pathlib import Path

import numpy as np
import pytest

from sgl_jax.checkpoint.convert import convert
from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.models.config import ModelConfigError
from tests.executor.draft_checks import (
    GREEDY,
    PROMPTS,
    RANDOM,
    check_drafts,
    check_draws,
    check_same_tokens,
    rows,
)
from tests.executor.step_driver import Driver
from tests.models.eagle3_reference import (
    CONFIG,
    HEAD_CONFIG,
    VOCAB,
    Eagle3Reference,
    chain_weights,
    head_weights,
    model_weights,
    write_checkpoint,
)
from tests.support.long import long

pytestmark = pytest.mark.usefixtures("few_shapes")

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
QWEN3 = CONFIG | {"architectures": ["Qwen3ForCausalLM"]}


@pytest.fixture
def make_settings(tmp_path):
    def make(config=CONFIG, head_config=HEAD_CONFIG, weights=None, num_drafts=3):
        is_qwen = config["architectures"] == QWEN3["architectures"]
        model, head = weights or (model_weights(qk_norm=is_qwen), head_weights())
        return {
            "model_path": str(write_checkpoint(tmp_path / "model", config, model)),
            "load_format": "safetensors",
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(
                write_checkpoint(tmp_path / "head", head_config, head)
            ),
            "speculative_num_draft_tokens": num_drafts,
        }

    return make


def without_drafts(settings):
    return {name: own for name, own in settings.items() if "speculative" not in name}


@pytest.mark.parametrize(
    "case",
    [
        (CONFIG, {"dp_size": 2, "tp_size": 2}),
        *long(
            (QWEN3, {}),
            (CONFIG, {"page_size": 1}),
            (CONFIG, {"page_size": 16}),
            (CONFIG, {"dp_size": 2, "tp_size": 2, "weight_sharding": "data"}),
            (CONFIG, {"tp_size": 4}),
            (QWEN3, {"tp_size": 2, "hidden_sharding": "tensor"}),
        ),
    ],
    ids=lambda case: f"{case[0]['architectures'][0]}-{case[1]}",
)
def test_drafts_are_those_of_the_plain_layer(make_executor, make_settings, case):
    config, settings = case
    is_qwen = config is QWEN3
    reference = Eagle3Reference(model_weights(qk_norm=is_qwen), head_weights())
    executor = make_executor(**make_settings(config) | settings)
    assert check_drafts(executor, reference, 7) > 15


@pytest.mark.long
@pytest.mark.parametrize(
    "named",
    [{"eagle_config": {LAYER_IDS: [0, 3, 5]}}, {LAYER_IDS: [1, 4, 6]}],
    ids=["outputs", "inputs"],
)
def test_a_config_names_the_layers_that_the_head_reads(make_executor, make_settings, named):
    executor = make_executor(**make_settings(head_config=HEAD_CONFIG | named))
    reference = Eagle3Reference(model_weights(), head_weights(), captured=(1, 4, 6))
    assert check_drafts(executor, reference, 7) > 15


@pytest.mark.long
def test_a_head_may_share_the_models_own(make_executor, make_settings):
    head = {name: own for name, own in head_weights().items() if name not in ("lm_head.weight",)}
    config = {name: own for name, own in HEAD_CONFIG.items() if name != "draft_vocab_size"}
    executor = make_executor(**make_settings(head_config=config, weights=(model_weights(), head)))
    del head["d2t"]  # a checkpoint may hold it although no column needs it
    assert check_drafts(executor, Eagle3Reference(model_weights(), head), 7) > 15


@pytest.mark.long
def test_a_model_from_orbax_takes_its_head_from_safetensors(make_executor, make_settings, tmp_path):
    settings = make_settings()
    convert(Path(settings["model_path"]), tmp_path / "orbax", "float32")
    settings |= {"model_path": str(tmp_path / "orbax"), "load_format": "orbax"}
    reference = Eagle3Reference(model_weights(), head_weights())
    assert check_drafts(make_executor(**settings), reference, 7) > 15


# By default test_model_executor has the same of n-grams: drafts of every kind are verified alike.
@pytest.mark.long
@pytest.mark.parametrize("sampling", [RANDOM, GREEDY], ids=["random", "greedy"])
def test_drafts_change_no_token(make_executor, make_settings, sampling):
    settings = make_settings()
    plain = make_executor(**without_drafts(settings))
    check_same_tokens(plain, make_executor(**settings), sampling)


def test_the_right_drafts_are_accepted(make_executor, make_settings):
    config = HEAD_CONFIG | {"draft_vocab_size": VOCAB}
    weights = chain_weights()
    executor = make_executor(**make_settings(head_config=config, weights=weights, num_drafts=1))
    (output,) = Driver(executor, rows(prompts=PROMPTS[:1]), num_drafts=1).run(8)
    assert output == [(PROMPTS[0][-1] + 1 + i) % VOCAB for i in range(1 + 7 * 2)]


@pytest.mark.long
@pytest.mark.parametrize("num_draws", [3_000, 100_000])
def test_draws_with_drafts_are_of_the_models_distribution(make_executor, make_settings, num_draws):
    """Some drafts are right, and some are wrong."""
    model, head = chain_weights(vocab_size=12)
    small = {"vocab_size": 12, "eos_token_id": 0}
    config = HEAD_CONFIG | small | {"draft_vocab_size": 12}
    model["lm_head.weight"] *= 0.3
    head["lm_head.weight"] *= 0.3
    executor = make_executor(**make_settings(CONFIG | small, config, (model, head)))
    vectors = model["model.embed_tokens.weight"].astype(np.float64)
    normal = vectors / np.sqrt(np.mean(vectors**2, axis=-1, keepdims=True))
    logits = normal @ model["lm_head.weight"].T
    assert 1.1 < check_draws(executor, logits, 0.8, num_draws) < 3.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architecture 'Qwen3ForCausalLM' is no EAGLE-3"),
        ({"num_hidden_layers": 2}, "num_hidden_layers of an EAGLE-3 head must be 1, got 2"),
        ({"hidden_size": 64}, "hidden_size must be the model's 32, got 64: it reads the model's"),
        ({"vocab_size": 128}, "vocab_size must be the model's 96, got 128"),
        ({"num_key_value_heads": 4}, "num_key_value_heads must be the model's 2, got 4: its KV is"),
        ({"draft_vocab_size": 97}, "draft_vocab_size (97) must be at most vocab_size (96)"),
        ({"eagle_config": {LAYER_IDS: [1, 6]}}, f"{LAYER_IDS} must be ascending layers in [0, 6)"),
        ({"eagle_config": {LAYER_IDS: [3, 1]}}, f"{LAYER_IDS} must be ascending layers in [0, 6)"),
        ({LAYER_IDS: []}, f"{LAYER_IDS} must be ascending layers in [0, 7), got []"),
        ({"eagle_config": [1]}, "eagle_config must be an object, got [1]"),
        ({"norm_before_residual": True}, "norm_before_residual of an EAGLE-3 head must be False"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "a quantized EAGLE-3 head is not supported",
        ),
    ],
    ids=lambda own: next(iter(own)) if isinstance(own, dict) else "",
)
def test_a_head_that_does_not_fit_is_refused(make_args, make_settings, changes, message):
    with pytest.raises(ModelConfigError, match=re.escape(message)):
        ModelExecutor(make_args(**make_settings(head_config=HEAD_CONFIG | changes)))


def test_a_shallow_model_needs_the_layers_named(make_args, make_settings):
    settings = make_settings(CONFIG | {"num_hidden_layers": 6})
    with pytest.raises(ModelConfigError, match=f"{LAYER_IDS} for a model of 6 layers"):
        ModelExecutor(make_args(**settings))


def test_columns_for_tokens_that_do_not_exist_are_refused(make_args, make_settings):
    head = head_weights()
    head["d2t"][-1] = VOCAB
    with pytest.raises(CheckpointError, match=r"must be ascending tokens in \[0, 96\)"):
        ModelExecutor(make_args(**make_settings(weights=(model_weights(), head))))


def test_a_head_and_its_algorithm_need_each_other(make_args):
    with pytest.raises(ValueError, match="speculative-draft-model-path need each other"):
        make_args(speculative_algorithm="EAGLE3")
    with pytest.raises(ValueError, match="speculative-draft-model-path need each other"):
        make_args(speculative_draft_model_path="head")


def test_a_folder_without_a_config_is_refused(make_args, make_settings, tmp_path):
    settings = make_settings() | {"speculative_draft_model_path": str(tmp_path)}
    with pytest.raises(ModelConfigError, match=r"no config\.json in"):
        ModelExecutor(make_args(**settings))
