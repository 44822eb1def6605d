"""Train the draft layer of the hybrid demonstration model on a CPU, in about a quarter of an hour.

    python -m benchmarks.demo_model.train_draft_layer

The model stays as it is: the layer (`mtp.` in its file) learns the model's own distribution of the
token after the next one, on the dialogues that trained the model, and from its own results the
distributions of further ones. Needs the extra ``train`` (optax).
"""

import argparse
import json
import logging
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.demo_model.dense_qwen3 import Params
from benchmarks.demo_model.hybrid_qwen3_5 import HybridQwen35
from benchmarks.demo_model.tasks import DEFAULT_MIX
from benchmarks.demo_model.train import Batch, make_optimizer, read_params, training_batch

logger = logging.getLogger("benchmarks.demo_model")

# The share of the model's own curriculum that has dialogues of 128 and 256 tokens, and the part of
# its batches that suffices here.
_PROGRESS, _PART = 0.4, 2
_NUM_PASSES = 3  # drafts whose distributions are learned; a server may draft more


def draft_loss(
    draft_params: Params, params: Params, batch: Batch, config: HybridQwen35
) -> tuple[jax.Array, jax.Array]:
    """Mean cross entropy of all passes against the model's distributions, and each pass's share of
    most likely tokens that are the model's, [passes]."""
    tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    hidden = jax.lax.stop_gradient(config.hidden_states(params, tokens, positions))
    wanted = config.logits(params, hidden)[:, 1:-1]
    weights = jnp.asarray(batch.weights)[:, 2:]
    losses, shares = [], []
    passes = config.draft_hidden_states(
        params | draft_params, hidden, tokens, positions, _NUM_PASSES
    )
    for number, result in enumerate(passes):
        logits = config.logits(params, result)[:, :-2]
        own = weights.at[:, :number].set(0.0)  # these read results from before the first token
        loss = optax.softmax_cross_entropy(logits, jax.nn.softmax(wanted))
        losses.append(jnp.sum(own * loss) / jnp.sum(own))
        is_equal = jnp.argmax(logits, axis=-1) == jnp.argmax(wanted, axis=-1)
        shares.append(jnp.sum(own * is_equal) / jnp.sum(own))
    return jnp.mean(jnp.stack(losses)), jnp.stack(shares)


def train(folder: Path, steps: int, seed: int) -> None:
    """Train the draft layer of the model in `folder`, and write it to the model's file."""
    config = HybridQwen35()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    params = read_params(folder)
    draft_params = config.init_draft_params(jax.random.key(seed))
    optimizer = make_optimizer(draft_params, steps)
    opt_state = optimizer.init(draft_params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(
        draft_params: Params, opt_state: optax.OptState, batch: Batch
    ) -> tuple[Params, optax.OptState, jax.Array]:
        grads, shares = jax.grad(draft_loss, has_aux=True)(draft_params, params, batch, config)
        updates, opt_state = optimizer.update(grads, opt_state, draft_params)
        return optax.apply_updates(draft_params, updates), opt_state, shares

    started, recent = time.monotonic(), []
    for step in range(1, steps + 1):
        batch = training_batch(tokenizer, seed, step, _PROGRESS, dict(DEFAULT_MIX))
        batch = Batch(*(own[: len(own) // _PART] for own in batch))
        draft_params, opt_state, shares = update(draft_params, opt_state, batch)
        recent.append(np.asarray(shares))
        if step % 50 == 0 or step == steps:
            equal = np.mean(recent[-50:], axis=0).round(3).tolist()
            seconds = round(time.monotonic() - started)
            logger.info("step %d equal %s seconds %d", step, equal, seconds)
    stored = load_file(folder / "model.safetensors")
    stored |= {
        name: np.asarray(leaf).astype(ml_dtypes.bfloat16) for name, leaf in draft_params.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "training.json"
    own = {"seed": seed, "steps": steps, "seconds": seconds, "equal": equal}
    record = json.loads(path.read_text()) | {"draft_layer": own}
    path.write_text(json.dumps(record, indent=1) + "\n")
    path = folder / "config.json"
    described = json.loads(path.read_text()) | {"mtp_num_hidden_layers": 1}
    path.write_text(json.dumps(described, indent=2) + "\n")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo_hybrid"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(args.model, args.steps, args.seed)


if __name__ == "__main__":
    main()
