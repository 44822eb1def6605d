"""Train the demonstration model with GRPO: tunix trains, and an `Engine` generates the samples.

It needs the extra `tunix`. The rotary base of tunix's Qwen3 is 1,000,000; the demonstration model
was trained with 10,000, so the policy begins with mostly wrong answers. The script prints the mean
reward of each step, and draws the rewards if a file is named:

    python examples/rollout/grpo_with_tunix.py models/demo 30 rewards.svg
"""

import functools
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from transformers import AutoTokenizer
from tunix.models.qwen3.model import ModelConfig
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgl_jax.rollout import TunixRollout

ROPE_THETA = 1_000_000
NUM_PROMPTS, NUM_SAMPLES = 4, 8  # of a step
PROMPT = "<|im_start|>user\nReverse {}.<|im_end|>\n<|im_start|>assistant\n"


def load_policy(model_path: str, mesh: Mesh) -> Any:
    """Load the model's weights into tunix's Qwen3."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    shape = ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=ROPE_THETA,
        norm_eps=config["rms_norm_eps"],
        use_tied_embedding=True,
    )
    return create_model_from_safe_tensors(model_path, shape, mesh)


def copy_model(model_path: str, folder: str) -> str:
    """Copy a model's folder with tunix's rotary base, for the engine."""
    shutil.copytree(model_path, folder, dirs_exist_ok=True)
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": ROPE_THETA}))
    return folder


def questions(num_steps: int) -> list[dict[str, np.ndarray]]:
    rng, batches = random.Random(0), []
    for _ in range(num_steps):
        texts = [" ".join(str(rng.randrange(10)) for _ in range(3)) for _ in range(NUM_PROMPTS)]
        prompts = [PROMPT.format(text) for text in texts]
        answers = [f"{text[::-1]}." for text in texts]
        batches.append({"prompts": np.array(prompts), "answer": np.array(answers)})
    return batches


def reward(completion: str, answer: str) -> float:
    """Return the share of characters that are right."""
    num_right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return num_right / max(len(completion), len(answer))


def train(policy_path: str, num_steps: int, **settings: Any) -> tuple[list[float], TunixRollout]:
    """Return each step's mean reward, and the rollout with its running engine.

    Args:
        policy_path: the policy's first weights, and its tokenizer.
        settings: of the engine.
    """
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    rewards: list[float] = []

    def rewards_of(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        each = [reward(*pair) for pair in zip(completions, answer, strict=True)]
        rewards.append(float(np.mean(each)))
        print(f"step {len(rewards):2}  reward {rewards[-1]:.2f}", flush=True)
        return each

    cluster = RLCluster(
        actor=load_policy(policy_path, mesh),
        tokenizer=AutoTokenizer.from_pretrained(policy_path),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=functools.partial(TunixRollout, **settings),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(3e-4),
                eval_every_n_steps=10**6,
                max_steps=num_steps,
                mini_batch_size=NUM_PROMPTS,
                train_micro_batch_size=NUM_PROMPTS,
            ),
            rollout_config=RolloutConfig(max_tokens_to_generate=12, max_prompt_length=48),
        ),
    )
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=NUM_SAMPLES, beta=0.0), rewards_of)
    learner.train(questions(num_steps))
    return rewards, cluster.rollout


def draw(rewards: list[float], file: str) -> None:
    from matplotlib import pyplot

    pyplot.figure(figsize=(6, 3))
    pyplot.plot(range(1, len(rewards) + 1), rewards)
    pyplot.xlabel("step")
    pyplot.ylabel("mean reward")
    pyplot.ylim(0, 1)
    pyplot.tight_layout()
    pyplot.savefig(file)


def main(model_path: str = "models/demo", num_steps: str = "30", file: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_model(model_path, folder)
        rewards, rollout = train(
            model_path, int(num_steps), model_path=copy, dtype="float32", max_total_tokens=8192
        )
        rollout.engine.shutdown()
    if file:
        draw(rewards, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
