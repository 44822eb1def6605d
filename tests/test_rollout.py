"""tunix drives an engine as its rollout: samples, log-probabilities, and updates of weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("tunix", reason="the extra tunix is not installed")

from transformers import AutoTokenizer
from tunix.rl import common
from tunix.rl.rollout.base_rollout import RolloutConfig

from examples.rollout import grpo_with_tunix as grpo
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.rollout import TunixRollout

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "models" / "demo")
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 8192,
    "page_size": 16,
    "warmup": "none",
    "check_memory": "busy",
}
PROMPTS = [grpo.PROMPT.format("1 2 3"), grpo.PROMPT.format("4 0 8"), "The code of Anna is"]


@pytest.fixture(scope="module")
def policy() -> nnx.Module:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    return grpo.load_policy(DEMO, mesh)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return grpo.copy_model(DEMO, str(tmp_path_factory.mktemp("model")))


def configured(temperature: float, **fields: Any) -> RolloutConfig:
    return RolloutConfig(
        max_tokens_to_generate=12, max_prompt_length=40, temperature=temperature, **fields
    )


@pytest.fixture(scope="module")
def rollout(policy: nnx.Module, folder: str) -> Iterator[TunixRollout]:
    rollout = TunixRollout(
        rollout_actor=policy,
        tokenizer=AutoTokenizer.from_pretrained(DEMO),
        rollout_config=configured(0.7),
        mesh=None,
        model_path=folder,
        **SETTINGS,
    )
    with rollout.engine:
        yield rollout


def completions_of(rollout: TunixRollout, tokens: list[np.ndarray]) -> np.ndarray:
    padded = np.full((len(tokens), 12), rollout.pad_id(), np.int32)
    for row, own in zip(padded, tokens, strict=True):
        row[: len(own)] = own
    return padded


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_the_trainers(
    rollout: TunixRollout, policy: nnx.Module, temperature: float
) -> None:
    config = configured(temperature, seed=jax.random.key(3))
    output = rollout.generate(PROMPTS, config)
    completions = completions_of(rollout, output.tokens)
    graph, state = nnx.split(policy)
    expected = common.compute_per_token_logps(
        graph,
        state,
        prompt_tokens=jnp.array(output.left_padded_prompt_tokens),
        completion_tokens=jnp.array(completions),
        pad_id=rollout.pad_id(),
        eos_id=rollout.eos_id(),
        temperature=temperature,
    )
    assert output.logprobs is not None
    for row, tokens, logprobs in zip(expected, output.tokens, output.logprobs, strict=True):
        assert logprobs.shape == tokens.shape
        np.testing.assert_allclose(logprobs, row[: len(tokens)], atol=2e-5)


def test_scores_of_completions_are_those_of_their_generation(rollout: TunixRollout) -> None:
    output = rollout.generate(PROMPTS, configured(0.7))
    completions = completions_of(rollout, output.tokens)
    scores = rollout.get_per_token_logps(
        jnp.array(output.left_padded_prompt_tokens), jnp.array(completions)
    )
    assert output.logprobs is not None
    for row, logprobs in zip(scores, output.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(logprobs)], logprobs, atol=2e-5)
        assert not row[len(logprobs) :].any()


def test_the_last_token_is_scored_if_it_pads_too(
    rollout: TunixRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    eos = rollout.eos_id()
    row = [*rollout.generate(PROMPTS[:1], configured(0.7)).tokens[0].tolist()[:3], eos]
    prompt = jnp.array([rollout._encode(PROMPTS[0])])
    (expected,) = rollout.get_per_token_logps(prompt, jnp.array([row]))
    assert expected[3]
    monkeypatch.setattr(rollout, "pad_id", rollout.eos_id)
    (scores,) = rollout.get_per_token_logps(prompt, jnp.array([[*row, eos, eos]]))
    np.testing.assert_allclose(scores, [*expected, 0, 0], atol=2e-5)


def test_prompts_are_padded_on_the_left_and_keep_their_last_tokens(rollout: TunixRollout) -> None:
    config = configured(0.7)
    config.max_prompt_length = 6
    padded = rollout.generate(["The code", PROMPTS[0]], config).left_padded_prompt_tokens
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    short = tokenizer.encode("The code")
    assert padded[0].tolist() == [rollout.pad_id()] * (6 - len(short)) + short
    assert padded[1].tolist() == tokenizer.encode(PROMPTS[0])[-6:]


@pytest.mark.parametrize("seed", [jax.random.key(5), jnp.uint32(5), jax.random.PRNGKey(5)])
def test_a_seed_gives_the_same_samples_and_each_sample_its_own(
    rollout: TunixRollout, seed: jax.Array
) -> None:
    config = configured(1.5, seed=seed)
    first, again = (rollout.generate([PROMPTS[2]] * 4, config).text for _ in range(2))
    assert first == again
    assert len(set(first)) > 1


def test_an_update_is_served_and_the_trainer_may_delete_its_arrays(
    rollout: TunixRollout, policy: nnx.Module
) -> None:
    params = nnx.state(policy, nnx.Param)
    greedy = configured(0.0)
    before = rollout.generate(PROMPTS, greedy).text
    zeros = jax.tree.map(jnp.zeros_like, params)
    rollout.update_params(zeros)
    jax.tree.map(lambda array: array.delete(), zeros)
    assert rollout.generate(PROMPTS, greedy).text != before
    rollout.update_params(params)
    assert rollout.generate(PROMPTS, greedy).text == before


def test_adapters_and_foreign_parameters_are_refused(rollout: TunixRollout) -> None:
    with pytest.raises(ValueError, match="not LoRA adapters"):
        rollout.update_params({}, (nnx.LoRAParam,))
    num_updates = rollout.num_updates
    with pytest.raises(InvalidRequestError, match=r"other\.w is unexpected"):
        rollout.update_params({"other": {"w": jnp.ones(3)}})
    assert rollout.num_updates == num_updates


@pytest.mark.timeout(1200)
def test_rewards_rise_within_thirty_steps_of_grpo(folder: str) -> None:
    rewards, rollout = grpo.train(DEMO, 30, model_path=folder, **SETTINGS)
    with rollout.engine:
        assert rollout.num_updates >= 30
        assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
