"""What a random run of the scheduler begins with: sizes, settings and how it is driven."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from sgl_jax.core.engine_sizes import FULL_ATTENTION, LAST_VALUE, CacheGroup, EngineSizes
from sgl_jax.core.scheduler_args import SchedulerArgs
from tests.scheduler.driver import forced_retract, make_sizes

MAX_QUEUED = 40
# Enabled, and whether low values come first.
PRIORITIES = [(False, False), (True, False), (True, True)]
# What steps are padded to, beside the most that a step may hold; None for no padding.
WINDOWS = ["shared pool", "own pool", "alone"]
HOSTS = [
    (ratio, policy, waits)
    for ratio in (0.3, 1.0, 4.0)
    for policy in ("write_through", "write_through_selective", "write_back")
    for waits in (None, "best_effort", "wait_complete")
]
SHAPES = [None, (), (2, 8), (1, 3, 6, 10, 14), (4, 12), (7,), (5, 9, 20)]


@dataclass(frozen=True)
class Setup:
    """One engine. Fields that are not explained are those of `EngineSizes` or `SchedulerArgs`."""

    dp_size: int
    page_size: int
    pool_tokens: int  # of each rank; it has three pages at least
    num_rows: int  # of each rank
    chunk: int  # prompt tokens of a step and rank
    max_unread: int  # steps whose results may wait to be read
    radix: bool
    policy: str
    balance: str
    conservativeness: float
    num_draft_tokens: int
    shapes: tuple[int, ...] | None  # of `SHAPES`
    retract_interval: int  # 0: no forced retract
    no_prefill_bs: int
    is_replayed: bool  # whether its events are run again at the end
    timeouts_s: tuple[float, float]  # to wait, and in all
    priorities: tuple[bool, bool]  # of `PRIORITIES`
    threshold: int
    max_skip_count: int
    eviction: str
    session_memory_fraction: float = 0.8
    max_sessions: int = 4096
    # Where windows keep their pages, of `WINDOWS`, and their tokens; None: no layer has a window.
    windows: tuple[str, int] | None = None
    # With recurrent layers: slots for snapshots, and the intervals at which they are kept in
    # prompts and in outputs, in pages.
    states: tuple[int, int, int] | None = None
    aging_s: float = 0.0  # with priorities
    num_decode_steps: int = 1  # of a plan; 1 with drafts or states
    # Of tenants: how many there are beside none, and whether they have shares.
    num_tenants: int = 0
    is_fair: bool = False
    # With a prefix cache: host memory, in multiples of the device's, its write policy, and
    # the prefetch policy of a store below it, if there is one.
    host: tuple[float, str, str | None] | None = None

    def groups(self) -> tuple[CacheGroup, ...]:
        """Of layers."""
        groups = FULL_ATTENTION
        if self.windows is not None:
            where, size = self.windows
            window = CacheGroup(size, 1 if where == "own pool" else 0)
            groups = (window,) if where == "alone" else (*FULL_ATTENTION, window)
        if self.states is None:
            return groups
        return *groups, CacheGroup(LAST_VALUE, groups[-1].pool + 1, is_recurrent=True)

    def sizes(self) -> EngineSizes:
        """What the executor offers."""
        sizes = make_sizes(
            dp_size=self.dp_size,
            page_size=self.page_size,
            num_pages=1 + max(self.pool_tokens // self.page_size, 3),
            num_rows=self.num_rows,
            max_chunk_tokens=self.chunk,
            max_prompt_logprob_tokens=5,
            max_draft_tokens=self.num_draft_tokens,
            groups=self.groups(),
            states=self.states,
            host_ratio=self.host[0] if self.host and self.radix else 0.0,
        )
        has_steps = not self.num_draft_tokens and self.states is None
        sizes = sizes._replace(max_decode_steps=self.num_decode_steps if has_steps else 1)
        if self.shapes is None:
            return sizes
        most = sizes.max_step_tokens
        smaller = (shape for shape in self.shapes if shape < most)
        return sizes._replace(step_token_shapes=(*smaller, most))

    def args(self) -> SchedulerArgs:
        """Settings of the scheduler."""
        return SchedulerArgs(
            disable_radix_cache=not self.radix,
            schedule_policy=self.policy,
            load_balance_method=self.balance,
            schedule_conservativeness=self.conservativeness,
            max_queued_requests=MAX_QUEUED,
            **forced_retract(self.retract_interval),
            test_retract_no_prefill_bs=self.no_prefill_bs,
            waiting_timeout=self.timeouts_s[0],
            request_timeout=self.timeouts_s[1],
            enable_priority_scheduling=self.priorities[0],
            schedule_low_priority_values_first=self.priorities[1],
            priority_scheduling_preemption_threshold=self.threshold,
            priority_aging_s=self.aging_s if self.priorities[0] else 0.0,
            fair_share="tokens" if self.is_fair else "off",
            radix_eviction_policy=self.eviction,
            session_memory_fraction=self.session_memory_fraction,
            max_sessions=self.max_sessions,
            hicache_fetch_policy="sooner" if self.is_fair else "always",
            hicache_write_policy=self.host[1] if self.host else "write_through",
            hicache_storage_backend="file" if self.host and self.host[2] else "none",
            hicache_storage_prefetch_policy=(self.host and self.host[2]) or "timeout",
        )


# The least of everything; tests of one case change what it needs.
PLAIN = Setup(
    dp_size=1,
    page_size=1,
    pool_tokens=128,
    num_rows=3,
    chunk=1,
    max_unread=0,
    radix=False,
    policy="fcfs",
    balance="prefix_aware",
    conservativeness=0.0,
    num_draft_tokens=0,
    shapes=None,
    retract_interval=0,
    no_prefill_bs=0,
    is_replayed=False,
    timeouts_s=(0.0, 0.0),
    priorities=(False, False),
    threshold=0,
    max_skip_count=1,
    eviction="adaptive",
)


_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "dp_size": st.integers(1, 4),
    "page_size": st.sampled_from([1, 4, 16]),
    "pool_tokens": st.sampled_from([48, 80, 128, 256]),
    "num_rows": st.integers(3, 9),
    "chunk": st.sampled_from([1, 3, 8, 16, 64]),
    "max_unread": st.integers(0, 2),
    "radix": st.booleans(),
    "policy": st.sampled_from(["fcfs", "lpm"]),
    "balance": st.sampled_from(["prefix_aware", "round_robin"]),
    "conservativeness": st.sampled_from([0.0, 0.3, 1.0, 10.0]),
    "num_draft_tokens": st.sampled_from([0, 0, 1, 3, 4]),
    "num_decode_steps": st.sampled_from([1, 2, 4, 16]),
    "shapes": st.sampled_from(SHAPES),
    "retract_interval": st.sampled_from([0, 0, 1, 2, 3, 5]),
    "no_prefill_bs": st.sampled_from([0, 0, 1, 2, 5]),
    "is_replayed": st.sampled_from([False, False, False, True]),
    "timeouts_s": st.sampled_from([(0.0, 0.0), (0.0, 0.0), (5.0, 0.0), (0.0, 9.0), (4.0, 8.0)]),
    "priorities": st.sampled_from(PRIORITIES),
    "threshold": st.sampled_from([0, 0, 10]),
    "aging_s": st.sampled_from([0.0, 0.0, 0.5, 30.0]),
    "num_tenants": st.integers(0, 4),
    "is_fair": st.booleans(),
    "max_skip_count": st.sampled_from([1, 3, 128]),
    "eviction": st.sampled_from(["adaptive", "adaptive", "lru"]),
    "windows": st.none() | st.tuples(st.sampled_from(WINDOWS), st.integers(2, 40)),
    "host": st.none() | st.sampled_from(HOSTS),
    "states": st.none() | st.tuples(st.integers(1, 24), st.integers(1, 4), st.integers(1, 2)),
}


def setups(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Setup]:
    """Any setup, but for the `fields` given."""
    return st.builds(Setup, **_FIELDS | fields)
