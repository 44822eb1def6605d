"""Train a layer that drafts for a demonstration model on a CPU, in about a quarter of an hour.

    python -m benchmarks.demo_model.train_draft_layer --model hybrid
    python -m benchmarks.demo_model.train_draft_layer --model dense

The hybrid gets a draft layer (`mtp.`) in its file, the dense model an EAGLE-3 head in a separate
folder next to the model's. The model does not change. The layer learns the model's distribution of
the token after the next one, on the dialogues that trained the model, and from its results the
distributions of the following tokens. Needs the extra ``train`` (optax).
"""

import argparse
import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.demo_model.dense_qwen3 import DenseQwen3, Params
from benchmarks.demo_model.eagle3_head import Eagle3Head
from benchmarks.demo_model.hybrid_qwen3_5 import HybridQwen35
from benchmarks.demo_model.tasks import DEFAULT_MIX
from benchmarks.demo_model.train import MODELS, Batch, make_optimizer, read_params, training_batch

logger = logging.getLogger("benchmarks.demo_model")

# The share of the model's curriculum with dialogues of 128 and 256 tokens, and the part of its
# batches that suffices here.
_PROGRESS, _PART = 0.4, 2
_NUM_PASSES = 3  # drafts in training; a server may draft more
_NUM_DRAFTED, _COUNTED_BATCHES = 512, 100  # the head drafts the most frequent tokens
HEAD_FOLDER = Path("models/demo_eagle3")

Drafting = HybridQwen35 | Eagle3Head


def draft_loss(
    draft_params: Params, params: Params, batch: Batch, drafting: Drafting
) -> tuple[jax.Array, jax.Array]:
    """Return the mean cross entropy of all passes against the model's distributions, and the share
    of each pass's most likely tokens that equal the model's, [passes]."""
    tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    start, model_logits = jax.lax.stop_gradient(drafting.model_outputs(params, tokens, positions))
    columns = jnp.asarray(drafting.token_ids)
    wanted = model_logits[:, 1:-1, columns]
    best = jnp.argmax(model_logits[:, 1:-1], axis=-1)
    weights = jnp.asarray(batch.weights)[:, 2:]
    losses, shares = [], []
    passes = drafting.draft_logits(params | draft_params, start, tokens, positions, _NUM_PASSES)
    for number, result in enumerate(passes):
        logits = result[:, :-2]
        own = weights.at[:, :number].set(0.0)  # these read results from before the first token
        is_equal = columns[jnp.argmax(logits, axis=-1)] == best
        shares.append(jnp.sum(own * is_equal) / jnp.sum(own))
        own *= jnp.isin(best, columns)  # no column is right elsewhere
        loss = optax.softmax_cross_entropy(logits, jax.nn.softmax(wanted))
        losses.append(jnp.sum(own * loss) / jnp.sum(own))
    return jnp.mean(jnp.stack(losses)), jnp.stack(shares)


def train(drafting: Drafting, folder: Path, steps: int, seed: int) -> tuple[Params, dict[str, Any]]:
    """Train the layer for the model in `folder`; return its weights and a record of the run."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    params = read_params(folder)
    draft_params = drafting.init_draft_params(jax.random.key(seed))
    optimizer = make_optimizer(draft_params, steps)
    opt_state = optimizer.init(draft_params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(
        draft_params: Params, opt_state: optax.OptState, batch: Batch
    ) -> tuple[Params, optax.OptState, jax.Array]:
        grads, shares = jax.grad(draft_loss, has_aux=True)(draft_params, params, batch, drafting)
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
    return draft_params, {"seed": seed, "steps": steps, "seconds": seconds, "equal": equal}


def frequent_tokens(folder: Path, seed: int) -> tuple[int, ...]:
    """Return the most frequent tokens of the dialogues' answers, ascending."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    counts = np.zeros(tokenizer.get_vocab_size())
    for step in range(_COUNTED_BATCHES):
        batch = training_batch(tokenizer, seed, step, _PROGRESS, dict(DEFAULT_MIX))
        np.add.at(counts, batch.tokens, batch.weights)
    return tuple(sorted(np.argsort(-counts, kind="stable")[:_NUM_DRAFTED].tolist()))


def write_draft_layer(folder: Path, draft_params: Params, record: dict[str, Any]) -> None:
    """Add the layer to the model in `folder`."""
    stored = load_file(folder / "model.safetensors") | _as_stored(draft_params)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    _change_json(folder / "training.json", {"draft_layer": record}, indent=1)
    _change_json(folder / "config.json", {"mtp_num_hidden_layers": 1}, indent=2)


def write_head(
    folder: Path, head: Eagle3Head, draft_params: Params, record: dict[str, Any]
) -> None:
    """Write the checkpoint of a head; files of its names are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.array(head.token_ids)
    stored = _as_stored(draft_params) | {
        "d2t": tokens - np.arange(len(tokens)),
        "t2d": np.isin(np.arange(head.model.vocab_size), tokens),
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head.describe(), indent=2) + "\n")
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def _as_stored(params: Params) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf).astype(ml_dtypes.bfloat16) for name, leaf in params.items()}


def _change_json(path: Path, changes: dict[str, Any], *, indent: int) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content, indent=indent) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="hybrid")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config, folder = MODELS[args.model]
    if isinstance(config, DenseQwen3):
        head = Eagle3Head(config, frequent_tokens(folder, args.seed))
        write_head(HEAD_FOLDER, head, *train(head, folder, args.steps, args.seed))
    else:
        write_draft_layer(folder, *train(config, folder, args.steps, args.seed))


if __name__ == "__main__":
    main()
