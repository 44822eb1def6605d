"""The engine's Prometheus metrics: memory, load and tokens of every data-parallel rank.

Owns the last state reported by the engine (`GetState`), which a scrape shows while the engine is
busy. Must never call the engine.

Names and labels are SGLang's, so that its dashboards work. Labels of parallel workers have one
value, because one engine drives all chips. In `kv_pages`, the states of each pool's pages add up to
its total.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sgl_jax.core.engine_messages import HostReport
from sgl_jax.core.messages import HINT_OUTCOMES, HINTS
from sgl_jax.core.transfers import STORE_MISSES
from sgl_jax.metrics.rank_state import (
    FULL,
    STATES,
    WINDOW,
    State,
    evictable,
    host_block_states,
    kind_of,
    max_tokens,
    page_states,
    pool_names,
    row_states,
    share,
    token_usage,
    usage,
    used_tokens,
)
from sgl_jax.metrics.request_metrics import RequestMetrics
from sgl_jax.metrics.tenant_metrics import TenantMetrics

# Values of a figure's additional labels, and its value.
Rows = Iterable[tuple[*tuple[str, ...], float]]
_WORKER_LABELS = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}


class Figure(NamedTuple):
    """A metric: its name after `sglang:`, help text, additional labels, and values in a state."""

    name: str
    help_text: str
    rows: Callable[[State], Rows]
    labels: tuple[str, ...] = ()
    is_counter: bool = False

    def family(self, state: State, labels: Mapping[str, str]) -> Metric:
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        family = kind(f"sglang:{self.name}", self.help_text, labels=[*labels, *self.labels])
        for *own, value in self.rows(state):
            family.add_metric([*labels.values(), *map(str, own)], value)
        return family


class EngineMetrics:
    """A Prometheus collector over the engine's last reported state."""

    def __init__(self, requests: RequestMetrics) -> None:
        self._requests = requests
        self._state: State = {"ranks": [], "counters": {}, "waiting_for": {}}
        self._tenants = TenantMetrics(requests.model_name)
        self._hosts = HostMetrics(requests.model_name)
        requests.registry.register(self)

    def update(self, state: State) -> None:
        """Store `Reply.data` of a `GetState`."""
        self._state = state
        self._tenants.update(state.get("tenants", {}))
        self._hosts.hosts = msgspec.convert(state.get("hosts", []), list[HostReport])

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; called by the registry at each scrape."""
        labels = {"model_name": self._requests.model_name, **_WORKER_LABELS}
        state = {**self._state, "generation_rate": self._requests.generation_rate()}
        for figure in FIGURES:
            yield figure.family(state, labels)
        yield from self._tenants.collect()
        yield from self._hosts.collect()


def _of_kind(kind: str) -> Callable[[State], float]:
    return lambda rank: usage(pool for pool in rank["pools"] if kind_of(pool) == kind)


def _accept_length(state: State) -> Rows:
    counters = state["counters"]
    steps = counters.get("verified_rows", 0)
    yield (1 + counters.get("accepted_draft_tokens", 0) / steps if steps else 0.0,)


def _of_ranks(name: str, help_text: str, value: Callable[[State], float]) -> Figure:
    return Figure(
        name,
        help_text,
        lambda state: [(rank["dp_rank"], value(rank)) for rank in state["ranks"]],
        ("dp_rank",),
    )


def _of_pools(
    name: str, help_text: str, key: str, states_of: Callable[[State], dict[str, int]]
) -> Figure:
    """Return a figure of pool states from a rank's list `key`, which has all pools or none."""
    return Figure(
        name,
        help_text,
        lambda state: [
            (rank["dp_rank"], pool_name, pool_state, count)
            for rank in state["ranks"]
            if rank[key]
            for pool_name, pool in zip(pool_names(rank), rank[key], strict=True)
            for pool_state, count in states_of(pool).items()
        ],
        ("dp_rank", "pool", "state"),
    )


def _count(name: str, help_text: str, key: str = "", **labels: str) -> Figure:
    """Return a figure of a rank's counter, with additional constant labels. `key` names the counter
    if it differs from the figure."""
    return Figure(
        name,
        help_text,
        lambda state: [
            (*labels.values(), rank["dp_rank"], rank["counters"][key or name])
            for rank in state["ranks"]
        ],
        (*labels, "dp_rank"),
        is_counter=True,
    )


def _of_engine(name: str, help_text: str, key: str = "") -> Figure:
    return Figure(
        name, help_text, lambda state: [(state["counters"].get(key or name, 0),)], is_counter=True
    )


FIGURES = (
    _of_ranks("num_running_reqs", "requests running", itemgetter("num_running")),
    _of_ranks("num_queue_reqs", "requests waiting for this rank", itemgetter("num_waiting")),
    Figure(
        "num_retracted_reqs",
        "requests waiting to run again after a retract",
        lambda state: [(state.get("num_waiting_retracted", 0),)],
    ),
    Figure(
        "waiting_for",
        "requests waiting, by the reason why",
        lambda state: state["waiting_for"].items(),
        ("reason",),
    ),
    # The name is SGLang's.
    Figure(
        "num_grammar_queue_reqs",
        "requests waiting until their grammar is compiled",
        lambda state: [(state["waiting_for"].get("grammar", 0),)],
    ),
    _of_ranks("max_total_num_tokens", "tokens that the KV pages hold", max_tokens),
    _of_ranks("page_size", "tokens of a page", itemgetter("page_size")),
    _of_ranks("num_pages", "KV pages", itemgetter("total_pages")),
    _of_ranks("num_used_tokens", "tokens of pages in use", used_tokens),
    _of_ranks("kv_used_tokens", "tokens of pages in use", used_tokens),
    _of_ranks(
        "kv_available_tokens",
        "tokens of free pages",
        lambda rank: rank["free_pages"] * rank["page_size"],
    ),
    _of_ranks(
        "kv_evictable_tokens",
        "tokens of cached pages that may be evicted",
        lambda rank: evictable(rank) * rank["page_size"],
    ),
    _of_ranks("token_usage", "share of the pages in use", token_usage),
    _of_ranks("full_token_usage", "share in use, of full attention's pages", _of_kind(FULL)),
    _of_ranks("swa_token_usage", "share in use, of sliding windows' pages", _of_kind(WINDOW)),
    _of_ranks("mamba_usage", "share in use, of recurrent states' slots", _of_kind(STATES)),
    _of_pools(
        "kv_pages", "pages of a pool by state; the others add up to total", "pools", page_states
    ),
    _of_pools(
        "host_blocks",
        "blocks of prefixes in host memory, of a pool by state; the others add up to total",
        "host_pools",
        host_block_states,
    ),
    Figure(
        "rows",
        "rows by state; the others add up to total",
        lambda state: [
            (rank["dp_rank"], name, count)
            for rank in state["ranks"]
            for name, count in row_states(rank).items()
        ],
        ("dp_rank", "state"),
    ),
    _of_ranks(
        "new_token_ratio",
        "pages reserved for running requests' output, per page that they may come to take",
        lambda rank: rank["forecast_pages"] / max(rank["most_growth_pages"], 1),
    ),
    Figure(
        "num_streaming_sessions", "sessions open", lambda state: [(state.get("num_sessions", 0),)]
    ),
    _of_ranks(
        "streaming_session_held_tokens",
        "tokens of pages that idle sessions alone hold",
        lambda rank: rank["session_pages"] * rank["page_size"],
    ),
    Figure(
        "cache_hit_rate",
        "share of prompt tokens found in the prefix cache",
        lambda state: [(share(state["counters"], "cached_tokens", "prompt_tokens"),)],
    ),
    Figure("spec_accept_length", "tokens per verified row, with the one sampled", _accept_length),
    Figure(
        "spec_accept_rate",
        "share of drafted tokens accepted",
        lambda state: [(share(state["counters"], "accepted_draft_tokens", "drafted_tokens"),)],
    ),
    _count("prompt_tokens", "prompt tokens of requests at their first start"),
    _count("cached_tokens", "prompt tokens found in the prefix cache", cache_source="device"),
    _count("num_retracted_requests", "retracts", "requests_retracted"),
    _count(
        "num_retracted_input_tokens",
        "prompt tokens of retracted requests",
        "retracted_input_tokens",
    ),
    _count(
        "num_retracted_output_tokens",
        "output tokens of retracted requests",
        "retracted_output_tokens",
    ),
    _count("num_preempted_requests", "retracts for more important requests", "requests_preempted"),
    _count("image_encodings", "images computed by the vision tower"),
    _count("image_cache_hits", "images of starting requests that needed no computation"),
    _count("evicted_pages", "pages evicted from the prefix cache"),
    _count("host_fetched_tokens", "tokens of prefixes fetched from host memory"),
    _count("host_copied_pages", "pages of the first pool copied to the host"),
    _count("host_failed_transfers", "transfers of host memory that failed"),
    _count("store_loaded_tokens", "tokens of prefixes loaded from the store below host memory"),
    _count("store_put_blocks", "blocks put into that store"),
    Figure(
        "store_misses",
        "lookups that found nothing to load: the store has none of the pages (absent), has them in "
        "values of another size (page_size), or lacks a window or state at the ends of this "
        "engine's pages (not_resumable)",
        lambda state: [
            (why, rank["dp_rank"], rank["counters"][f"store_misses_{why}"])
            for rank in state["ranks"]
            for why in STORE_MISSES
        ],
        ("reason", "dp_rank"),
        is_counter=True,
    ),
    Figure(
        "cache_hints",
        "hints of clients, of requests that ended: recorded for the order of expected returns, "
        "recorded for a shorter time (capped), or ignored",
        lambda state: [
            (hint, outcome, rank["dp_rank"], rank["counters"][f"hints_{hint}_{outcome}"])
            for rank in state["ranks"]
            for hint in HINTS
            for outcome in HINT_OUTCOMES
        ],
        ("hint", "outcome", "dp_rank"),
        is_counter=True,
    ),
    Figure(
        "retained_pages",
        "pages that other pages of the same client were evicted for, as a hint asked (exchanged), "
        "and pages evicted before the time that a hint asked for",
        lambda state: [
            (outcome, rank["dp_rank"], rank["counters"][f"retained_pages_{outcome}"])
            for rank in state["ranks"]
            for outcome in ("exchanged", "evicted")
        ],
        ("outcome", "dp_rank"),
        is_counter=True,
    ),
    _count("evicted_sessions", "idle sessions evicted", "sessions_evicted"),
    Figure(
        "realtime_tokens",
        "tokens computed for prompts, found in the cache, and generated",
        lambda state: [
            (mode, state["counters"].get(key, 0))
            for mode, key in (
                ("prefill_compute", "prefilled_tokens"),
                ("prefill_cache", "cached_tokens"),
                ("decode", "generated_tokens"),
            )
        ],
        ("mode",),
        is_counter=True,
    ),
    _of_engine("grammars_compiled", "grammars compiled"),
    Figure(
        "compilations",
        "programs compiled, by the time: at start, in the background, or in the loop when ready",
        lambda state: [
            (when, state["counters"].get(f"compiles_{when}", 0))
            for when in ("at_start", "in_background", "after_ready")
        ],
        ("when",),
        is_counter=True,
    ),
    _of_engine("steps", "steps whose results were applied"),
    _of_engine("num_timed_out_requests", "requests ended by a time limit", "requests_timed_out"),
    _of_engine(
        "num_displaced_sessions",
        "idle sessions closed because another tenant took their place",
        "sessions_displaced",
    ),
    _of_engine("memory_errors", "defects found in the records of memory"),
    _of_engine("step_failures", "steps that failed on the device"),
    _of_engine(
        "nonfinite_rows", "requests ended because the model computed NaN or infinity for them"
    ),
    _of_engine(
        "store_failures", "calls of that store that failed or were overdue, and failed probes"
    ),
    _of_engine("memory_walks", "complete walks of the memory of a busy engine"),
    Figure(
        "memory_audit_age_seconds",
        "seconds since all records of memory were last proved",
        lambda state: [(state.get("memory_audit_age_s", 0.0),)],
    ),
    Figure(
        "gen_throughput", "output tokens per second", lambda state: [(state["generation_rate"],)]
    ),
)


def _of_hosts(key: str) -> Callable[[State], Rows]:
    return lambda state: [(host.rank, getattr(host.figures, key)) for host in state["hosts"]]


# In a step with collectives all hosts end together. A slow host therefore shows in its time to
# launch, and in a step time shorter than that on the other hosts, which wait for it.
HOST_FIGURES = (
    *(
        Figure(name, help_text, _of_hosts(key), ("host",), is_counter=True)
        for name, help_text, key in (
            ("host_steps", "steps that a host has run", "num_steps"),
            (
                "host_launch_seconds",
                "time from a step's arrival at a host to its launch",
                "launch_s",
            ),
            ("host_step_seconds", "time from a step's arrival at a host to its tokens", "step_s"),
        )
    ),
    Figure(
        "host_silent_seconds",
        "time since a host's last sign of life",
        lambda state: [(host.rank, host.silent_s) for host in state["hosts"]],
        ("host",),
    ),
)


class HostMetrics:
    """A Prometheus collector over the last figures of the `hosts` of one engine."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self.hosts: Sequence[HostReport] = ()

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; called by the registry at each scrape."""
        for figure in HOST_FIGURES:
            yield figure.family({"hosts": self.hosts}, self._labels)
