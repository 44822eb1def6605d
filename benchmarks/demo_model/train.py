"""Train a demonstration model on a CPU, from random weights, in about an hour.

``--model dense`` is the Qwen3 of ``models/demo`` (``dense_qwen3`` in this folder), ``--model
hybrid`` the Qwen3.5 of ``models/demo_hybrid`` (``hybrid_qwen3_5``). The data are the dialogues of
``dialogues`` with the tasks of ``tasks``.

An interrupted run continues from its last checkpoint when started again with the same arguments.
Needs the extra ``train`` (optax). Never imported by the server.
"""

import argparse
import json
import logging
import pickle
import random
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax.contrib
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.demo_model import tasks
from benchmarks.demo_model.dense_qwen3 import DenseQwen3, Params
from benchmarks.demo_model.dialogues import DRILL_MIX, TOOL_MIX, write_dialogue
from benchmarks.demo_model.hybrid_qwen3_5 import HybridQwen35
from benchmarks.demo_model.model_folder import SPECIAL_TOKENS, plain_messages, write_model_folder
from benchmarks.demo_model.tasks import (
    DEFAULT_MIX,
    TASKS,
    TOOL_TASKS,
    Message,
    Question,
    Split,
)
from benchmarks.demo_model.tool import GET_WEATHER

logger = logging.getLogger("benchmarks.demo_model")

Config = DenseQwen3 | HybridQwen35
# Each model, and the folder it is exported to.
MODELS: dict[str, tuple[Config, Path]] = {
    "dense": (DenseQwen3(), Path("models/demo")),
    "hybrid": (HybridQwen35(), Path("models/demo_hybrid")),
}

# Sequence length in tokens -> sequences per step: about 4,096 tokens in each step.
BATCH_OF_LENGTH = {128: 32, 256: 16, 512: 8, 1344: 3}
# Up to this share of the run, the chances of the lengths above: short dialogues come first.
CURRICULUM = (
    (0.25, (1.0, 0.0, 0.0, 0.0)),
    (0.45, (0.6, 0.4, 0.0, 0.0)),
    (0.88, (0.6, 0.3, 0.08, 0.02)),
    (1.01, (0.5, 0.2, 0.15, 0.15)),
)
# Weight of the user's tokens; the assistant's have weight 1.
USER_TOKEN_WEIGHT = 0.01
# Share of the dialogues that only state and recall facts, mostly one attribute of many people.
# Without them the model returns, until late in training, another person's value of that kind.
DRILL_SHARE = 0.7
# Share of the dialogues in which the tool is offered.
TOOL_SHARE = 0.25
# A trained model continues from this share of the curriculum, at this rate.
_CONTINUED_FROM, _CONTINUED_RATE = 0.45, 0.3
# Positions are stretched to at most this, so that far-away facts are seen at a short length's cost.
MAX_TRAINED_POSITION = 2048


class Batch(NamedTuple):
    """Tokens, their positions, and the loss weight of each as a target: all [B, T]."""

    tokens: np.ndarray
    positions: np.ndarray
    weights: np.ndarray


def train_tokenizer(config: Config) -> Tokenizer:
    """Train byte-level BPE on training dialogues: any text encodes, every digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ["system\nuser\nassistant\n" for _ in range(1000)]
    for seed in range(1000):
        messages = write_dialogue(random.Random(f"tokenizer {seed}"), "train", 256)
        texts += [message["content"] for message in messages]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_messages(
    tokenizer: Tokenizer, messages: list[Message], length: int
) -> tuple[list[int], list[float], list[int]]:
    """Return token ids, target weights and the starts of the turns, cut to ``length`` tokens."""
    pieces: list[str] = []
    weight_of_piece: list[float] = []
    for message in messages:
        role, text = message["role"], message["content"]
        pieces += [f"<|im_start|>{role}\n", f"{text}<|im_end|>", "\n"]
        text_weight = 1.0 if role == "assistant" else USER_TOKEN_WEIGHT
        weight_of_piece += [USER_TOKEN_WEIGHT, text_weight, USER_TOKEN_WEIGHT]
    ids: list[int] = []
    weights: list[float] = []
    starts = []
    for i, encoding in enumerate(tokenizer.encode_batch_fast(pieces)):
        if i % 3 == 0 and messages[i // 3]["role"] == "user":
            starts.append(len(ids))
        ids += encoding.ids
        weights += [weight_of_piece[i]] * len(encoding.ids)
    return ids[:length], weights[:length], [start for start in starts if start < length]


def make_batch(
    tokenizer: Tokenizer, dialogues: list[list[Message]], length: int, rng: random.Random | None
) -> Batch:
    """Pad dialogues to [B, length]; with ``rng``, stretch the positions of half of them."""
    shape = (len(dialogues), length)
    tokens, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    gaps = np.ones(shape, np.int32)
    gaps[:, 0] = 0
    for row, messages in enumerate(dialogues):
        ids, target_weights, starts = encode_messages(tokenizer, messages, length)
        tokens[row, : len(ids)] = ids
        weights[row, : len(ids)] = target_weights
        if rng is not None and rng.random() < 0.5 and len(starts) > 1:
            # A few jumps between turns, as if other talk had been there.
            for start in rng.sample(starts[1:], min(3, len(starts) - 1)):
                gaps[row, start] += rng.randrange((MAX_TRAINED_POSITION - length) // 3)
    return Batch(tokens, np.cumsum(gaps, axis=1, dtype=np.int32), weights)


def training_batch(
    tokenizer: Tokenizer, seed: int, step: int, progress: float, mix: dict[str, float]
) -> Batch:
    """Return the batch of one step: a function of its arguments, so that a run can be resumed."""
    rng = random.Random(f"{seed} {step}")
    chances = next(chances for end, chances in CURRICULUM if progress < end)
    length = rng.choices(list(BATCH_OF_LENGTH), chances)[0]
    dialogues = []
    for _ in range(BATCH_OF_LENGTH[length]):
        if length >= 1024 and rng.random() < 0.5:
            question = tasks.make_question("recall_long", rng, "train")
            dialogues.append(with_answer(question))
            continue
        if rng.random() < TOOL_SHARE:
            dialogue = write_dialogue(rng, "train", length, TOOL_MIX)
            dialogues.append(plain_messages(dialogue, (GET_WEATHER,)))
            continue
        max_facts = rng.choice((2, 4, 8, 12))
        if rng.random() < DRILL_SHARE:
            attributes = tuple(rng.sample(tasks.ATTRIBUTES, rng.choice((1, 1, 2, 3))))
            dialogue = write_dialogue(rng, "train", length, DRILL_MIX, max_facts, attributes)
        else:
            dialogue = write_dialogue(rng, "train", length, mix, max_facts)
        dialogues.append(dialogue)
    return make_batch(tokenizer, dialogues, length, rng)


def with_answer(question: Question) -> list[Message]:
    """Return the whole conversation, including its right answer."""
    answer = {"role": "assistant", "content": question.answer}
    return plain_messages([*question.messages, answer], question.tools)


def loss_of(params: Params, batch: Batch, config: Config) -> jax.Array:
    """Compute the mean weighted cross entropy of the next token."""
    tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    logits = config.forward(params, tokens, positions)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    weights = batch.weights[:, 1:]
    return jnp.sum(weights * nll) / jnp.sum(weights)


@partial(jax.jit, static_argnames="config")
def predict(params: Params, tokens: jax.Array, positions: jax.Array, config: Config) -> jax.Array:
    """Return the most likely next token after each position, [B, T]."""
    return jnp.argmax(config.forward(params, tokens, positions), axis=-1)


def accuracy_by_task(
    params: Params, tokenizer: Tokenizer, config: Config, split: Split, per_task: int, seed: int
) -> dict[str, float]:
    """Return the share of questions with the right answer in greedy decoding, by task.

    No decoding loop is needed: the greedy answer is the right one exactly if, fed the right answer,
    every token of it is the most likely one.
    """
    scores = {}
    for task in (*TASKS, *TOOL_TASKS):
        length, rows = 512 if task in TOOL_TASKS else 256, 16
        if task == "recall_long":
            length, rows = 1344, 4
        questions = tasks.held_out_questions(per_task, seed, split, (task,))
        num_right = 0
        for first in range(0, per_task, rows):
            dialogues = [with_answer(q) for q in questions[first : first + rows]]
            last = [encode_messages(tokenizer, d[-1:], length)[1] for d in dialogues]
            dialogues += [[]] * (rows - len(dialogues))
            batch = make_batch(tokenizer, dialogues, length, None)
            guesses = np.asarray(predict(params, batch.tokens, batch.positions, config))
            for row, weights in enumerate(last):
                end = int(np.flatnonzero(batch.weights[row] == 1.0)[-1]) + 1
                start = end - weights.count(1.0)
                right = guesses[row, start - 1 : end - 1] == batch.tokens[row, start:end]
                num_right += bool(right.all())
        scores[task] = num_right / per_task
    return scores


def steer_mix(scores: dict[str, float]) -> dict[str, float]:
    """Return the mix of turns for the next steps: kinds with low scores get more weight."""
    return {
        kind: weight * (0.5 + min(1.5, 4 * (1 - scores[kind]))) if kind in scores else weight
        for kind, weight in DEFAULT_MIX.items()
    }


def make_optimizer(
    params: Params, num_steps: int, scale: float = 1.0
) -> optax.GradientTransformation:
    """Return Muon for matrices and AdamW for the rest: warm-up, constant rate, linear decay.

    `scale` multiplies all rates.

    Muon (Jordan et al., 2024) needs about half of AdamW's steps for these tasks.
    """
    decay_from = int(0.6 * num_steps)

    def rate(peak: float) -> optax.Schedule:
        peak *= scale
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, peak, 100),
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, 0.02 * peak, num_steps - decay_from),
            ],
            [100, decay_from],
        )

    labels = {
        name: "matrix" if leaf.ndim == 2 and "embed" not in name else "other"
        for name, leaf in params.items()
    }
    by_label = {
        "matrix": optax.contrib.muon(rate(0.02), weight_decay=0.01),
        "other": optax.adamw(rate(0.003), b2=0.98, weight_decay=0.0),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(by_label, labels))


class Run(NamedTuple):
    """All that a checkpoint keeps."""

    step: int
    params: Params
    opt_state: optax.OptState
    mix: dict[str, float]
    best: float
    seconds: float
    history: list[dict[str, object]]


def train(args: argparse.Namespace) -> None:
    """Train to ``args.steps``; after each evaluation, export the best weights so far."""
    config = MODELS[args.model][0]
    if args.continue_from is None:
        tokenizer = train_tokenizer(config)
        params = config.init_params(jax.random.key(args.seed))
        begin, rate = 0.0, 1.0
    else:
        tokenizer = Tokenizer.from_file(str(args.continue_from / "tokenizer.json"))
        params = read_params(args.continue_from)
        begin, rate = _CONTINUED_FROM, _CONTINUED_RATE
    optimizer = make_optimizer(params, args.steps, rate)
    run = Run(0, params, optimizer.init(params), dict(DEFAULT_MIX), 0.0, 0.0, [])
    checkpoint = args.work_dir / "checkpoint.pkl"
    if checkpoint.exists():
        run = Run(*pickle.loads(checkpoint.read_bytes()))
        logger.info("continuing from step %d", run.step)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(
        params: Params, opt_state: optax.OptState, batch: Batch
    ) -> tuple[Params, optax.OptState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch, config)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    started = time.monotonic() - run.seconds
    for step in range(run.step, args.steps):
        progress = begin + (1 - begin) * step / args.steps
        batch = training_batch(tokenizer, args.seed, step, progress, run.mix)
        params, opt_state, loss = update(run.params, run.opt_state, batch)
        losses.append(float(loss))
        seconds = time.monotonic() - started
        run = run._replace(step=step + 1, params=params, opt_state=opt_state, seconds=seconds)
        if run.step % 50 == 0:
            logger.info("step %d loss %.4f seconds %.0f", run.step, np.mean(losses[-50:]), seconds)
        if run.step % args.eval_every == 0 or run.step == args.steps:
            run = evaluate_and_export(run, tokenizer, config, args)
            # Written aside first: an interruption must not cost the last good checkpoint.
            aside = checkpoint.with_suffix(".new")
            aside.write_bytes(pickle.dumps(jax.device_get(tuple(run))))
            aside.replace(checkpoint)
    record_test_scores(args.output, tokenizer, config, args.test_questions)


def record_test_scores(folder: Path, tokenizer: Tokenizer, config: Config, per_task: int) -> None:
    """Score the exported weights once on the test split; add the result to training.json."""
    scores = accuracy_by_task(read_params(folder), tokenizer, config, "test", per_task, 0)
    logger.info("test scores %s", scores)
    path = folder / "training.json"
    record = json.loads(path.read_text()) | {"test": scores, "test_questions_per_task": per_task}
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_params(folder: Path) -> Params:
    """Read the weights of an exported model, in fp32."""
    stored = load_file(folder / "model.safetensors")
    return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in stored.items()}


def evaluate_and_export(
    run: Run, tokenizer: Tokenizer, config: Config, args: argparse.Namespace
) -> Run:
    """Score the weights as they will be stored (bf16); export them if they are the best."""
    stored = {
        name: np.asarray(leaf).astype(ml_dtypes.bfloat16) for name, leaf in run.params.items()
    }
    rounded = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in stored.items()}
    scores = accuracy_by_task(rounded, tokenizer, config, "valid", args.eval_questions, 0)
    mean = sum(scores.values()) / len(scores)
    logger.info("step %d scores %s", run.step, scores)
    history = [*run.history, {"step": run.step, "seconds": round(run.seconds), "valid": scores}]
    run = run._replace(mix=steer_mix(scores), history=history)
    if mean < run.best:
        return run
    run = run._replace(best=mean)
    write_model_folder(args.output, config.describe(), tokenizer, stored)
    record = {
        "seed": args.seed,
        "steps": args.steps,
        "best_step": run.step,
        "history": history,
    }
    (args.output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--output", type=Path, help="a folder other than the model's in models/")
    parser.add_argument("--continue-from", type=Path, help="a model's folder, not from nothing")
    parser.add_argument("--work-dir", type=Path, required=True, help="for the checkpoint")
    parser.add_argument("--steps", type=int, default=3900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--eval-questions", type=int, default=80, help="per task")
    parser.add_argument("--test-questions", type=int, default=400, help="per task, at the end")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args.output = args.output or MODELS[args.model][1]
    args.work_dir.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
