"""Settings of a scheduler."""

import dataclasses
from dataclasses import dataclass

from sgl_jax.core.settings import check_settings, setting
from sgl_jax.core.shares import DEFAULT_PART


@dataclass(frozen=True)
class SchedulerArgs:
    """Settings of a scheduler, stored in a recording of its events."""

    # Memory
    disable_radix_cache: bool = setting(False, "cache no prefixes between requests")
    radix_eviction_policy: str = setting(
        "adaptive",
        "which cached prefixes are evicted first: least likely to be used again (adaptive), or "
        "least recently used (lru)",
        ("adaptive", "lru"),
    )
    radix_expected_return: str = setting(
        "on",
        "with adaptive eviction, also try to evict those paths of agents first whose next request "
        "is expected last, by the pauses of their conversations",
        ("on", "off"),
    )
    hicache_write_policy: str = setting(
        "write_through",
        "with --enable-hierarchical-cache, which prefixes are copied to the host: each "
        "(write_through), each that is used again (write_through_selective), or each before its "
        "eviction (write_back)",
        ("write_through", "write_through_selective", "write_back"),
    )
    hicache_fetch_policy: str = setting(
        "sooner",
        "with --enable-hierarchical-cache, when a prefix is fetched from the host, or loaded from "
        "the store behind it: if it arrives sooner than it could be computed, by measured rates "
        "(sooner), or always",
        ("sooner", "always"),
    )
    hicache_storage_backend: str = setting(
        "none",
        "with --enable-hierarchical-cache, a store below host memory for all that it gains: "
        "a folder (file), or Mooncake's distributed store (mooncake)",
        ("none", "file", "mooncake"),
    )
    hicache_storage_prefetch_policy: str = setting(
        "timeout",
        "whether a request waits for its prefix from the store: not (best_effort), until all of it "
        "has arrived (wait_complete), or at most --hicache-storage-prefetch-timeout (timeout)",
        ("best_effort", "wait_complete", "timeout"),
    )

    # Scheduling
    max_queued_requests: int = setting(
        2048,
        "waiting requests at most, besides all that run or can start; further ones get a 503",
        bounds=(1, 10_000_000),
    )
    schedule_policy: str = setting(
        "lpm",
        "which of the waiting requests that fit starts first: first come (fcfs), or longest cached "
        "prefix (lpm)",
        ("fcfs", "lpm"),
    )
    working_set_s: float = setting(
        30.0,
        "with lpm, while most evicted prefixes return: seconds for which a prefix stays after its "
        "last use, before prompts without a cached prefix may evict it; 0: they never wait for it",
        bounds=(0.0, 1e6),
    )
    working_set_max_wait_s: float = setting(
        600.0,
        "seconds for which a prompt waits for that at most; then it comes first",
        bounds=(0.0, 1e6),
    )
    schedule_conservativeness: float = setting(
        1.0,
        "factor of the price of a retract and, up to 1, of the pages kept for the growth of "
        "requests: 0 keeps none; above 1, requests start later and are retracted less often",
        bounds=(0.0, 10.0),
    )
    enable_priority_scheduling: bool = setting(
        False, "heed the priority of requests: larger values are more important"
    )
    schedule_low_priority_values_first: bool = setting(
        False, "with --enable-priority-scheduling, smaller values are more important"
    )
    priority_scheduling_preemption_threshold: int = setting(
        10,
        "with --enable-priority-scheduling, a running request is retracted only for one whose "
        "priority is higher by more than this",
        bounds=(0, 2**31 - 1),
    )
    priority_aging_s: float = setting(
        0.0,
        "with --enable-priority-scheduling, seconds of waiting that raise a request's priority by "
        "one; 0: waiting does not, and requests of low priority may starve",
        bounds=(0.0, 1e9),
    )
    fair_share: str = setting(
        "off",
        "how tenants of one priority share the engine: by order of arrival (off), or by tokens "
        "served, in proportion to their weights (tokens)",
        ("off", "tokens"),
    )
    tenant_share: float | None = setting(
        None,
        "part of the queue, the open sessions and their tokens that a tenant may hold, after other "
        f"tenants have theirs; 1: all. Default: {DEFAULT_PART} with --fair-share tokens or a file "
        "of keys, else 1",
        bounds=(0.01, 1.0),
    )
    load_balance_method: str = setting(
        "prefix_aware",
        "which rank gets a request: the one where it costs least (prefix_aware), or each in turn "
        "(round_robin)",
        ("prefix_aware", "round_robin"),
    )
    waiting_timeout: float = setting(
        0.0, "seconds a request may wait to start; 0: no limit", bounds=(0.0, 1e9)
    )
    request_timeout: float = setting(
        0.0, "seconds from arrival to the last token; 0: no limit", bounds=(0.0, 1e9)
    )
    random_seed: int = setting(0, "seed of requests that bring none, and of dummy weights")

    # Sessions
    session_memory_fraction: float = setting(
        0.8, "share of a rank's KV pages that idle sessions may hold", bounds=(0.0, 1.0)
    )
    max_sessions: int = setting(
        4096, "open sessions at most; further ones get a 503", bounds=(1, 1_000_000)
    )
    max_session_tokens: int = setting(
        67_108_864,
        "tokens of history kept for all sessions together; calls that need more get a 503",
        bounds=(1, 1_000_000_000_000),
    )

    # Proof
    check_memory: str = setting(
        "background",
        "when the page ledger of every rank is checked: never; by a full walk while idle; while "
        "busy also by a walk in slices every 20 s, in less than a hundredth of the host's time; or "
        "also by its counts after every step",
        ("off", "idle", "background", "busy"),
    )
    test_retract: bool = setting(
        False,
        "for tests: retract half of the running requests every few steps, though memory suffices",
        env="SGLANG_TEST_RETRACT",
    )
    test_retract_interval: int = setting(
        3,
        "steps from one forced retract to the next",
        env="SGLANG_TEST_RETRACT_INTERVAL",
        bounds=(1, 1_000_000),
    )
    test_retract_no_prefill_bs: int = setting(
        0,
        "with --test-retract, start no request while more than this run; 0: no limit",
        env="SGLANG_TEST_RETRACT_NO_PREFILL_BS",
        bounds=(0, 65536),
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.schedule_low_priority_values_first and not self.enable_priority_scheduling:
            raise ValueError(
                "--schedule-low-priority-values-first needs --enable-priority-scheduling"
            )
        if self.priority_aging_s and not self.enable_priority_scheduling:
            raise ValueError("--priority-aging-s needs --enable-priority-scheduling")

    def importance(self, priority: int) -> int:
        """Return `priority`, negated if lower is more important; 0 if priorities are off."""
        if not self.enable_priority_scheduling:
            return 0
        return -priority if self.schedule_low_priority_values_first else priority

    def for_scheduler(self) -> "SchedulerArgs":
        """Return a copy with only the scheduler's settings, and therefore without secrets."""
        names = [field.name for field in dataclasses.fields(SchedulerArgs)]
        settings = {name: getattr(self, name) for name in names}
        return SchedulerArgs(**settings | {"tenant_share": self.share_part})

    @property
    def share_part(self) -> float:
        if self.tenant_share is not None:
            return self.tenant_share
        return DEFAULT_PART if self.has_tenants else 1.0

    @property
    def expects_returns(self) -> bool:
        """Return True if evictions may be ordered by expected returns and by hints of clients."""
        is_adaptive = self.radix_eviction_policy == "adaptive" and not self.disable_radix_cache
        return is_adaptive and self.radix_expected_return == "on"

    @property
    def has_tenants(self) -> bool:
        """Return True if tenants have shares by default."""
        return self.fair_share == "tokens"

    @property
    def retract_interval(self) -> int:
        """Return the number of steps between forced retracts; 0: never."""
        return self.test_retract_interval if self.test_retract else 0
