"""Pages that one long request holds while it runs: `python -m benchmarks.host.window_pages`.

    python -m benchmarks.host.window_pages [--window 1024] [--tokens 32768] [--plot FILE]

Runs the real scheduler with a fake executor, for a model of two cache groups: one keeps every
token, one has a window. Counts the pages of each group that the request's row lists.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.host.steps import StepLoop
from sgl_jax.core.engine_sizes import CacheGroup, EngineSizes
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.planner.plot_file import figure_class, save_figure
from sgl_jax.scheduler.scheduler import Scheduler

_VOCAB_SIZE = 32_000


def long_request_sizes(window: int, num_tokens: int, chunk: int, page_size: int) -> EngineSizes:
    """Return sizes of an engine of one rank with memory for one request of `num_tokens`."""
    groups = (CacheGroup(None), CacheGroup(window))
    sizes = EngineSizes(
        dp_size=1,
        page_size=page_size,
        pool_pages=(1,),
        num_rows=2,
        max_context_len=num_tokens,
        max_step_tokens=chunk + 1,
        max_prompt_logprob_tokens=1,
        vocab_size=_VOCAB_SIZE,
        groups=groups,
    )
    return sizes._replace(pool_pages=(1 + sizes.request_pages(num_tokens),))


def pages_by_step(sizes: EngineSizes, prompt_len: int) -> Int32Array:
    """Run a request to the longest context; return int32[steps, 1 + groups].

    Columns are the computed tokens, and the pages of each group that the row lists after each step
    was planned.
    """
    scheduler = Scheduler(sizes, SchedulerArgs(disable_radix_cache=True))
    prompt = np.random.default_rng(0).integers(0, _VOCAB_SIZE, prompt_len).tolist()
    output_len = sizes.max_context_len - prompt_len
    sampling = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
    scheduler.handle(GenerateRequest(rid="long", input_ids=prompt, sampling=sampling))
    loop, counts = StepLoop(scheduler), []
    (rank,) = scheduler.ranks
    while not scheduler.is_idle:
        loop.turn()
        for lease in rank.memory.leases.values():
            listed = (lease.pages(sizes.page_size) > 0).sum(axis=1)
            counts.append([lease.kv_committed_len, *listed.tolist()])
    return np.array(counts, np.int32)


def plot(counts: Int32Array, sizes: EngineSizes, path: Path) -> None:
    """Draw the pages of both groups over the tokens of the request."""
    figure: Any = figure_class()(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    is_told = np.diff(counts[:, 1:], axis=0, prepend=-1).any(axis=1)  # from the step before
    counts = counts[is_told | (np.arange(len(counts)) == len(counts) - 1)]
    for number, group in enumerate(sizes.groups):
        size = group.sliding_window
        label = "full attention" if size is None else f"window of {size:,} tokens"
        axes.plot(counts[:, 0], counts[:, 1 + number], lw=1.2, label=label)
    axes.axhline(sizes.row_pages(sizes.groups[1]), lw=0.8, ls="--", color="0.5")
    axes.set(xlabel="tokens of the request", ylabel=f"pages of {sizes.page_size} tokens")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the most pages of each group, and draw them for `--plot`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    sizes = long_request_sizes(options.window, options.tokens, options.chunk, options.page_size)
    counts = pages_by_step(sizes, prompt_len=options.tokens * 3 // 4)
    full, window = counts[:, 1:].max(axis=0).tolist()
    print(
        f"{options.tokens:,} tokens, window {options.window:,}, chunks of {options.chunk:,}, pages "
        f"of {options.page_size}: at most {full} pages of full attention, {window} of the window; "
        f"window + chunk + 1 page are {sizes.row_pages(sizes.groups[1])}"
    )
    if options.plot:
        plot(counts, sizes, options.plot)


if __name__ == "__main__":
    main()
