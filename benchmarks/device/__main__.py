"""The engine loop's cost on top of the device's: `python -m benchmarks.device`.

Serves a batch of decoding requests through the whole engine loop (scheduler, executor, overlap; no
HTTP) and divides its tokens per second by the rate of the bare jitted step, run in a loop with the
same batch at the middle of its context. Both run in one process, the bare loop before and after, so
that a drift of the machine's speed affects the ratio least.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np

from benchmarks import DEMO_MODEL
from benchmarks.device.bare_steps import time_bare_steps
from sgl_jax.core.engine_messages import EngineMessage, OutputBatch
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import FrontMessage, GenerateRequest, Shutdown
from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import RankPlan, StatePlan, StepPlan
from sgl_jax.engine.loop.core import EngineCore

_PROMPT_LEN = 64


class SteadyLoad:
    """A channel that submits a batch at once and notes when each step's tokens come out."""

    def __init__(self, batch_size: int, output_len: int, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        sampling = SamplingParams(temperature=0.0, max_new_tokens=output_len, ignore_eos=True)
        self._inbox: list[FrontMessage] = [
            GenerateRequest(
                rid=str(i),
                input_ids=rng.integers(0, vocab_size, _PROMPT_LEN).tolist(),
                sampling=sampling,
            )
            for i in range(batch_size)
        ]
        self._batch_size = batch_size
        self._num_unfinished = batch_size
        self.step_ends: list[float] = []  # of steps in which every request gained a token

    def poll(self, timeout_s: float) -> list[FrontMessage]:
        """Return the whole batch on the first call, and a shutdown once all requests have ended."""
        messages, self._inbox = self._inbox, []
        if self._num_unfinished == 0:
            messages.append(Shutdown())
        return messages

    def send(self, message: EngineMessage) -> None:
        """Note the time of a full batch of tokens."""
        if not isinstance(message, OutputBatch):  # a heartbeat
            return
        if len(message.rids) == self._batch_size:
            self.step_ends.append(time.perf_counter())
        self._num_unfinished -= sum(output.finish is not None for output in message.outputs)

    def tokens_per_second(self) -> float:
        """Return tokens per second of the steps that decoded the whole batch, less the first 8."""
        ends = self.step_ends[8:]
        return self._batch_size * (len(ends) - 1) / (ends[-1] - ends[0])


def decode_plan(sizes: EngineSizes, batch_size: int, context_len: int) -> StepPlan:
    """Return a decode step of `batch_size` rows with distinct pages, all on rank 0."""
    pages_per_row = -(-(context_len + 1) // sizes.page_size)
    rows = np.arange(1, batch_size + 1, dtype=np.int32)
    # No two groups have a page in common, as groups may share a pool.
    shape = (len(sizes.groups), batch_size, pages_per_row)
    pages = 1 + np.arange(np.prod(shape)).reshape(shape)
    plan = RankPlan(
        rows=rows,
        kv_starts=np.full_like(rows, context_len),
        q_lens=np.ones_like(rows),
        samples=np.ones(batch_size, np.bool_),
        num_pages=pages_per_row,
        num_decode=batch_size,
        relayed=np.zeros(batch_size, np.bool_),
        states=StatePlan.from_nothing(batch_size) if sizes.state_group is not None else None,
    )
    paged = [number for number, group in enumerate(sizes.groups) if not group.is_recurrent]
    listed = {(0, row): pages[paged, row - 1].tolist() for row in rows.tolist()}
    return StepPlan(0, (plan,), PageChanges.listing(sizes, listed))


def measure(args: ServerArgs, batch_size: int, output_len: int) -> tuple[float, float]:
    """Return tokens per second of the bare step and of the engine loop."""
    core = EngineCore(args)
    sizes = core.executor.sizes
    plan = decode_plan(sizes, batch_size, _PROMPT_LEN + output_len // 2)
    num_steps = output_len // 2
    time_bare_steps(core.executor, plan, num_steps)  # warms caches
    bare_s = [time_bare_steps(core.executor, plan, num_steps)]
    load = SteadyLoad(batch_size, output_len, sizes.vocab_size)
    core.run(load, close=False)
    bare_s.append(time_bare_steps(core.executor, plan, num_steps))
    return batch_size * num_steps / (sum(bare_s) / len(bare_s)), load.tokens_per_second()


def main(argv: Sequence[str] | None = None) -> None:
    """Print bare and served tokens per second, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default=str(DEMO_MODEL))
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disable-overlap-schedule", action="store_true")
    options = parser.parse_args(argv)
    args = ServerArgs(
        model_path=options.model_path,
        load_format=options.load_format,
        context_length=2 * (_PROMPT_LEN + options.output_len),
        max_running_requests=options.batch_size,
        disable_overlap_schedule=options.disable_overlap_schedule,
        decode_log_interval=0,
        warmup="all",
    )
    print(f"{'bare tok/s':>12}{'served tok/s':>14}{'served / bare':>15}")
    ratios = []
    for _ in range(options.rounds):
        bare, served = measure(args, options.batch_size, options.output_len)
        ratios.append(served / bare)
        print(f"{bare:12.0f}{served:14.0f}{ratios[-1]:15.3f}", flush=True)
    print(f"median ratio {sorted(ratios)[len(ratios) // 2]:.3f}")


if __name__ == "__main__":
    main()
