"""Shared parts of commands on recorded traffic: the record, the settings of an engine without a
device, its step times, and the exit code."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sgl_jax.bench.trace.reading import VOCAB_SIZE
from sgl_jax.bench.trace.step_time import LinearStepTime, StepSeconds
from sgl_jax.core.command_line import add_arguments, check_numbers
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.buckets import choose_buckets
from sgl_jax.executor.device_defaults import resolve_for_device
from sgl_jax.mem_cache.errors import MemoryDefectError

# Server settings that affect steps only with the planner.
PLANNER_SETTINGS = ("quantization", "kv_cache_dtype")
# Large pages, as on TPUs.
DEFAULT_PAGE_SIZE = 128
# Approximate room for KV next to an 8B model in bfloat16 on eight v6e chips.
_DEFAULT_TOTAL_TOKENS = 1_536_000
_KV_BYTES_PER_TOKEN = 131_072  # Llama 3.1 8B in bfloat16
# Linear costs from `--planner-model` for Llama 3.1 8B with --tp-size 8 on v6e-8.
_LINEAR_COSTS = (
    ("step_base_ms", 3.6, "milliseconds of each step"),
    ("prefill_us_per_token", 12.0, "microseconds of each prompt token computed"),
    ("decode_us_per_row", 10.0, "microseconds of each decoding request"),
    ("kv_ns_per_token", 10.0, "nanoseconds of each KV token read"),
)


class SimulatedEngine(NamedTuple):
    """Sizes of an engine, the time of its steps, and a description of that time."""

    sizes: EngineSizes
    step_seconds: StepSeconds
    about: str
    page_bytes: tuple[int, ...]  # page size of each pool


def print_result(run: Callable[[], str]) -> int:
    """Print the text of a run, or its error. Return the exit code: 0 if the run ended, 1 if the
    memory does not match its ledger, 2 for bad input."""
    try:
        text = run()
    except MemoryDefectError as error:
        print(f"the memory is wrong: {error}", file=sys.stderr)
        return 1
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add the file, `--num-requests` and `--json`."""
    parser.add_argument(
        "file",
        type=Path,
        help="requests, one JSON object a line: docs/measurements/recorded_traffic.md",
    )
    parser.add_argument("--num-requests", type=int, metavar="N", help="the first N only")
    parser.add_argument("--json", action="store_true", help="print values as JSON")


def add_settings(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Add the flags of the named server settings, and `--page-size`."""
    add_arguments(parser, only=names)
    parser.add_argument(
        "--page-size",
        type=int,
        metavar="VALUE",
        help=f"tokens per KV page ({DEFAULT_PAGE_SIZE})",
    )


def add_step_time(parser: argparse._ActionsContainer) -> None:
    """Add the flags that `simulated_engine` reads in addition to settings, and `--speedup`."""
    parser.add_argument("--speedup", type=float, default=1.0, help="of arrivals (%(default)s)")
    for name, default, text in _LINEAR_COSTS:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float, default=default, help=f"{text} (%(default)s)")
    parser.add_argument(
        "--overlap-prefill",
        action="store_true",
        help="compute prompt tokens in parallel with decoding: a step takes the longer time",
    )
    parser.add_argument(
        "--kv-bytes-per-token",
        type=int,
        default=_KV_BYTES_PER_TOKEN,
        help="without --planner-model, for host memory (%(default)s)",
    )
    parser.add_argument("--planner-model", help="steps as long as the planner estimates for it")
    parser.add_argument("--topology", help="slice for --planner-model: v6e-8, v5p-8, ...")


def check_engine(words: argparse.Namespace) -> None:
    """Raise ValueError for arguments that `simulated_engine` would reject after minutes, or that
    would give no result."""
    check_numbers(
        words, counts=("page_size",), positive=("kv_bytes_per_token",), finite=("speedup",)
    )
    for name, _, _ in _LINEAR_COSTS:
        value = getattr(words, name)
        if not 0 <= value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must not be negative, got {value}")
    if words.step_base_ms == 0:
        raise ValueError("--step-base-ms must be positive: the clock would stand still")
    if words.overlap_prefill and words.planner_model is not None:
        raise ValueError("--overlap-prefill belongs to linear costs, not to --planner-model")
    if (words.planner_model is None) != (words.topology is None):
        raise ValueError("--planner-model and --topology go together")
    defaults = ServerArgs(model_path="")
    for name in PLANNER_SETTINGS:
        if words.planner_model is None and getattr(words, name) != getattr(defaults, name):
            raise ValueError(f"--{name.replace('_', '-')} needs --planner-model")


def simulated_engine(
    args: ServerArgs, words: argparse.Namespace, max_context_len: int
) -> SimulatedEngine:
    """Return the engine of `args`, with the step times chosen on the command line.

    Raises:
        RuntimeError: the planner's times need libtpu, which is not installed.
        ValueError: the model or slice is unknown, or the model cannot be split or does not fit.
    """
    if words.planner_model is not None:
        # Imported here, because nothing else in these commands needs jax.
        from sgl_jax.bench.trace.planned_time import planned_step_time

        sizes, planned = planned_step_time(args, words.topology)
        about = (
            f"steps as the planner estimates for {words.planner_model} on {words.topology}, "
            f"dp {args.dp_size} x tp {args.tp_size}"
        )
        return SimulatedEngine(sizes, planned.seconds, about, planned.page_bytes)
    limits = choose_buckets(resolve_for_device(args, "tpu"), "tpu")
    num_tokens = args.max_total_tokens or _DEFAULT_TOTAL_TOKENS
    sizes = EngineSizes(
        dp_size=args.dp_size,
        page_size=args.page_size,
        pool_pages=(1 + num_tokens // args.page_size,),
        num_rows=limits.rows + 1,
        max_context_len=max_context_len,
        max_step_tokens=limits.tokens,
        max_prompt_logprob_tokens=limits.prompt_logprob_tokens,
        vocab_size=VOCAB_SIZE,
    )
    costs = (getattr(words, name) for name, _, _ in _LINEAR_COSTS)
    linear = LinearStepTime(*costs)._replace(overlaps_prefill=words.overlap_prefill)
    about = (
        f"a step takes {linear.base_ms:g} ms, {linear.prefill_us_per_token:g} us a prompt token, "
        f"{linear.decode_us_per_row:g} us a decoding request, {linear.kv_ns_per_token:g} ns a KV "
        "token read"
    )
    if linear.overlaps_prefill:
        about += ", prompt tokens in parallel"
    if args.enable_hierarchical_cache:
        num_blocks = 1 + int(args.hicache_ratio * (sizes.pool_pages[0] - 1))
        sizes = sizes._replace(host_blocks=(num_blocks,))
    page_bytes = (args.page_size * words.kv_bytes_per_token,)
    return SimulatedEngine(sizes, linear.seconds, about, page_bytes)
