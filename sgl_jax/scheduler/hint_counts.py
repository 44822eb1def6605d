"""Counts what became of the hints that clients sent with their requests."""

from collections import Counter

from sgl_jax.core.messages import HINT_OUTCOMES, HINTS, GenerateRequest
from sgl_jax.mem_cache.eviction.retained_paths import MAX_KEEP_S


class HintCounts:
    """Counts by hint and outcome: *recorded* hints order evictions while the cache follows expected
    returns, *capped* ones, too, but for a shorter time than asked for. *Ignored* ones never do."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def add(self, request: GenerateRequest, *, is_recorded: bool) -> None:
        """Count the hints of a request that ended."""
        reuse, outcome = request.reuse, "recorded" if is_recorded else "ignored"
        self._counts["unknown_ignored"] += request.num_unknown_hints
        if reuse.pause_s is not None:
            self._counts[f"pause_{outcome}"] += 1
        if reuse.is_last:
            self._counts[f"evict_{outcome}"] += 1
        if reuse.keep_s:
            is_capped = is_recorded and reuse.keep_s > MAX_KEEP_S
            self._counts[f"retain_{'capped' if is_capped else outcome}"] += 1

    def counters(self) -> dict[str, int]:
        names = [f"{hint}_{outcome}" for hint in HINTS for outcome in HINT_OUTCOMES]
        return {f"hints_{name}": self._counts[name] for name in names}
