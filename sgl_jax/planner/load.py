"""The throughput of a load: mixed steps, at the rates that engines reach on real chips.

The times of steps (`step_time.py`) are bounds: nothing waits, and every unit works at its peak.
Here each part of a step is divided by the share of its rate that published engines reach.

In a steady state each finished request is replaced at once. While `rows` requests compute their
outputs, as many prompts are computed, a chunk a step, and those steps also decode the other rows: a
mixed step takes a chunk's time, and reads the KV of its decode rows.
"""

from typing import NamedTuple

from sgl_jax.planner.step_time import StepTime


class Reach(NamedTuple):
    """Shares of the peak rates that engines reach, and the host's time.

    Three numbers are fitted to half of the published figures (`python -m benchmarks.planner`,
    docs/measurements/planning.md).
    """

    attention: float = 0.86  # of the memory's bandwidth (arXiv 2604.15464)
    program: float = 0.84  # fitted: of all other computation
    links: float = 1.0  # fitted: of exchanges between chips that nothing overlaps
    host_s: float = 0.006  # fitted: in each step, what the host adds

    def step_s(self, time: StepTime) -> float:
        """Return the expected time of a step."""
        rest = time.total_s - time.attention_s - time.exposed_s
        attention = time.attention_s / self.attention
        return rest / self.program + attention + time.exposed_s / self.links + self.host_s


def requests_per_s(
    rows: int,
    input_len: int,
    output_len: int,
    chunk: int,
    steps: tuple[StepTime, StepTime],
    reach: Reach,
) -> float:
    """Return the finished requests per second of a rank.

    Args:
        rows: requests that run at once.
        input_len, output_len: tokens of each request.
        chunk: prompt tokens of a step.
        steps: a step of `rows` decode rows, and one of a chunk.
        reach: the rates.
    """
    decode, prefill = steps
    chunks = rows * input_len / chunk
    mixed_s = reach.step_s(prefill) + decode.attention_s / reach.attention
    rest = max(0.0, output_len - chunks)
    return rows / (chunks * mixed_s + rest * reach.step_s(decode))
