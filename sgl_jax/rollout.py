"""Rollouts for trainers of tunix, by the contract `BaseRollout` of tunix 0.1.7 (extra `tunix`).

    rollout = functools.partial(TunixRollout, model_path="models/demo", dtype="float32")
    ClusterConfig(rollout_engine=rollout, ...)

tunix makes the rollout, generates groups of samples with it, and hands it the trained weights.
"""

from typing import Any

import jax
import numpy as np
from flax import nnx
from numpy.typing import NDArray
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from sgl_jax.checkpoint.trainer_weights import Weights
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine


class TunixRollout(BaseRollout):  # type: ignore[misc]
    """An `Engine` as the rollout of a tunix cluster.

    Prompts are encoded by the trainer's tokenizer, since its log-probabilities are of those ids.

    Args:
        rollout_actor: the policy, whose weights are served from the start.
        tokenizer: the trainer's tokenizer.
        rollout_config: the configuration for training.
        mesh: ignored; the engine's devices follow from its settings.
        engine: an engine that serves the policy's architecture; None: a new one.
        settings: arguments of the new engine, as of `Engine`.
    """

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module | None = None,
        tokenizer: Any,
        rollout_config: RolloutConfig,
        mesh: jax.sharding.Mesh | None = None,
        engine: Engine | None = None,
        **settings: Any,
    ) -> None:
        self.engine = engine or Engine(**settings)
        is_adapted = isinstance(tokenizer, TokenizerAdapter)
        self._tokenizer: Any = tokenizer if is_adapted else TokenizerAdapter(tokenizer)
        self._temperature = rollout_config.temperature
        self.num_updates = 0
        if rollout_actor is not None:
            self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **_: object
    ) -> RolloutOutput:
        """Generate one sample per prompt, with the log-probabilities of the sampled distribution.

        Prompts keep their last `max_prompt_length` tokens. A seed gives each sample another one.
        """
        length = rollout_config.max_prompt_length
        ids = [self._encode(prompt)[-length:] for prompt in prompts]
        results = self.engine.generate(
            input_ids=ids,
            sampling_params=self._sampling(rollout_config, len(prompts)),
            return_logprob=True,
        )
        padded = np.full((len(ids), length), self.pad_id(), np.int32)
        for row, own in zip(padded, ids, strict=True):
            row[length - len(own) :] = own
        return RolloutOutput(
            text=[result.text for result in results],
            logits=None,
            tokens=[np.array(result.output_ids, np.int32) for result in results],
            left_padded_prompt_tokens=padded,
            logprobs=[
                np.array([token.logprob for token in result.logprobs], np.float32)
                for result in results
            ],
        )

    def _encode(self, prompt: str) -> list[int]:
        ids: list[int] = list(self._tokenizer.encode(prompt))
        bos = self._tokenizer.bos_id()
        return [bos, *ids] if bos and ids[:1] != [bos] else ids

    def _sampling(self, config: RolloutConfig, num_samples: int) -> list[SamplingParams]:
        seeds: list[int | None] = [None] * num_samples
        if config.seed is not None:
            seeds = jax.random.bits(_as_key(config.seed), (num_samples,), "uint32").tolist()
        return [
            SamplingParams(
                max_new_tokens=config.max_tokens_to_generate,
                temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=-1 if config.top_k is None else config.top_k,
                stop_token_ids=tuple(config.eos_tokens or [self.eos_id()]),
                seed=seed,
            )
            for seed in seeds
        ]

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> NDArray[np.float32]:
        """Score completions at the temperature of training.

        Args:
            prompt_tokens: int32 [B, prompt length], padded on the left.
            completion_tokens: int32 [B, completion length], padded on the right. A completion ends
                with its first end-of-sequence token.

        Returns:
            float32 [B, completion length]; 0 after a completion's end.
        """
        logps = np.zeros(completion_tokens.shape, np.float32)
        prompts = [_without_padding(row[::-1], self.pad_id())[::-1] for row in _rows(prompt_tokens)]
        completions = [
            _completion(row, self.eos_id(), self.pad_id()) for row in _rows(completion_tokens)
        ]
        scored = [index for index, completion in enumerate(completions) if completion]
        scores = self.engine.score(
            [prompts[index] for index in scored],
            [completions[index] for index in scored],
            temperature=self._temperature,
        )
        for index, values in zip(scored, scores, strict=True):
            logps[index, : len(values)] = values
        return logps

    def update_params(self, params: Weights, filter_types: tuple[type, ...] | None = None) -> None:
        """Serve the trainer's weights. Returns once the next step reads them.

        Raises:
            ValueError: only adapters are given.
            InvalidRequestError: the parameters are not those of the engine's model.
        """
        if filter_types and all(issubclass(kind, nnx.LoRAParam) for kind in filter_types):
            raise ValueError("TunixRollout takes the model's parameters, not LoRA adapters alone")
        self.engine.update_weights(params, version=str(self.num_updates))
        self.num_updates += 1

    def pad_id(self) -> int:
        """Return the trainer's padding token."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Return the trainer's end-of-sequence token."""
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """Return None: the engine shares no array with the trainer."""


def _as_key(seed: jax.Array) -> jax.Array:
    is_number = jax.numpy.ndim(seed) == 0 and jax.numpy.issubdtype(seed.dtype, jax.numpy.integer)
    return jax.random.key(seed) if is_number else seed


def _rows(tokens: jax.Array) -> list[list[int]]:
    rows: list[list[int]] = np.asarray(tokens).tolist()
    return rows


def _without_padding(tokens: list[int], pad_id: int) -> list[int]:
    end = len(tokens)
    while end and tokens[end - 1] == pad_id:
        end -= 1
    return tokens[:end]


def _completion(tokens: list[int], eos_id: int, pad_id: int) -> list[int]:
    """Return `tokens` up to the first end of sequence, which may be the padding token, too."""
    if eos_id in tokens:
        return tokens[: tokens.index(eos_id) + 1]
    return _without_padding(tokens, pad_id)
