"""One load through ours, ours without a reserve, and the reference."""

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.scheduling.reference import Reference
from benchmarks.scheduling.served import ServedEngine
from benchmarks.scheduling.simulation import Result, Simulation
from benchmarks.scheduling.traffic import Load
from sgl_jax.bench.trace.host_link import HostLink
from sgl_jax.core.scheduler_args import SchedulerArgs

_KV_BYTES_PER_TOKEN = 131_072  # of Llama 3.1 8B in bfloat16
_LINK_BYTES_PER_S = 16e9
_STORE_BYTES_PER_S = 3e9


LEAST_SPEED, MOST_WAIT = 0.95, 1.3
LEAST_WAIT_MS = 4.0  # about a step: shorter waits count as this


class Comparison(NamedTuple):
    ours: Result
    plain: Result  # ours with `schedule_conservativeness` 0
    reference: Result | None  # None: it does not know all that the load is about

    @property
    def simple(self) -> list[Result]:
        return [self.plain] if self.reference is None else [self.plain, self.reference]

    @property
    def speed(self) -> float:
        """Return tokens per second, relative to the better of the simple schedulers."""
        return self.ours.tokens_per_s / max(each.tokens_per_s for each in self.simple)

    @property
    def wait(self) -> float:
        """Return the mean wait, relative to the better of the simple schedulers."""
        return wait_ratio(self.ours.mean_wait_ms, [each.mean_wait_ms for each in self.simple])

    def group_wait(self, group: str) -> float:
        """Return the mean wait of one group, relative to the better of the simple schedulers."""
        waits = [each.groups[group].mean_wait_ms for each in self.simple if group in each.groups]
        return wait_ratio(self.ours.groups[group].mean_wait_ms, waits)

    @property
    def is_worse(self) -> bool:
        """Return whether ours is over 5 % slower, or requests wait over 1.3 times longer."""
        return self.speed < LEAST_SPEED or self.wait > MOST_WAIT


def wait_ratio(own_ms: float, others_ms: Iterable[float]) -> float:
    """Return a wait, relative to the shortest of the other waits."""
    return max(own_ms, LEAST_WAIT_MS) / max(min(others_ms, default=own_ms), LEAST_WAIT_MS)


def new_engine(load: Load, conservativeness: float = 1.0) -> ServedEngine:
    sizes = load.engine_sizes()
    settings = {"max_queued_requests": 100_000, "check_memory": "off", **load.args}
    args = SchedulerArgs(schedule_conservativeness=conservativeness, **settings)
    link = None
    if sizes.host_blocks:
        page_bytes = load.page_size * _KV_BYTES_PER_TOKEN
        num_pools = len(sizes.pool_pages)
        link = HostLink([page_bytes] * num_pools, _LINK_BYTES_PER_S, _STORE_BYTES_PER_S)
    return ServedEngine(sizes, args, link)


def serve(load: Load, conservativeness: float = 1.0) -> Result:
    """Serve a load by our scheduler, and audit its memory at the end."""
    engine = new_engine(load, conservativeness)
    result = Simulation(load, engine).run()
    engine.scheduler.audit()
    return result


def serve_by_reference(load: Load) -> Result:
    return Simulation(load, Reference(load.engine_sizes())).run()


def compare(load: Load) -> Comparison:
    """Serve a load by all three, or without the reference."""
    reference = serve_by_reference(load) if load.has_reference else None
    return Comparison(serve(load), serve(load, 0.0), reference)
