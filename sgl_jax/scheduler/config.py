"""The scheduler's settings, as far as they are not sizes of the engine."""

from typing import NamedTuple

from sgl_jax.core.server_args import ServerArgs


class SchedulerConfig(NamedTuple):
    """See `ServerArgs` for the meaning of each setting."""

    eos_token_ids: tuple[int, ...] = ()
    schedule_policy: str = "lpm"
    load_balance_method: str = "prefix_aware"
    schedule_conservativeness: float = 1.0
    chunked_prefill_size: int = 512  # and no more than EngineSizes.max_chunk_tokens
    max_queued_requests: int = 2048
    max_passed_over: int = 128  # younger requests that start before one for which a rank is held
    use_radix_cache: bool = True
    radix_eviction_policy: str = "adaptive"
    random_seed: int = 0
    num_draft_tokens: int = 0  # per row and step; 0 without speculative decoding
    session_memory_fraction: float = 1.0  # of a rank's pages that idle sessions may hold
    max_sessions: int = 4096
    max_session_tokens: int = 1 << 26  # of all sessions' histories, on the host
    check_every_step: bool = False  # prove the ledger's balance after each step
    forced_retract_interval: int = 0  # steps from one forced retract to the next; 0: never
    forced_retract_no_prefill_bs: int = 0  # start nothing while more run than this; 0: no bound
    waiting_timeout_s: float = 0.0  # 0: no limit
    request_timeout_s: float = 0.0  # 0: no limit
    enable_priority_scheduling: bool = False
    low_priority_values_first: bool = False
    preemption_threshold: int = 10  # priorities by which one must exceed another to preempt it

    def importance(self, priority: int) -> int:
        """A request's priority so that larger is more important; 0 unless priorities count."""
        if not self.enable_priority_scheduling:
            return 0
        return -priority if self.low_priority_values_first else priority

    @staticmethod
    def from_args(
        args: ServerArgs, eos_token_ids: tuple[int, ...], chunk: int
    ) -> "SchedulerConfig":
        """The scheduler's part of the server's arguments; `chunk` is the resolved chunk size."""
        return SchedulerConfig(
            eos_token_ids=eos_token_ids,
            schedule_policy=args.schedule_policy,
            load_balance_method=args.load_balance_method,
            schedule_conservativeness=args.schedule_conservativeness,
            chunked_prefill_size=chunk,
            max_queued_requests=args.max_queued_requests,
            use_radix_cache=not args.disable_radix_cache,
            radix_eviction_policy=args.radix_eviction_policy,
            random_seed=args.random_seed,
            num_draft_tokens=args.num_draft_tokens,
            session_memory_fraction=args.session_memory_fraction,
            max_sessions=args.max_sessions,
            max_session_tokens=args.max_session_tokens,
            check_every_step=args.check_memory == "busy",
            forced_retract_interval=args.test_retract_interval if args.test_retract else 0,
            forced_retract_no_prefill_bs=args.test_retract_no_prefill_bs,
            waiting_timeout_s=args.waiting_timeout,
            request_timeout_s=args.request_timeout,
            enable_priority_scheduling=args.enable_priority_scheduling,
            low_priority_values_first=args.schedule_low_priority_values_first,
            preemption_threshold=args.priority_scheduling_preemption_threshold,
        )
