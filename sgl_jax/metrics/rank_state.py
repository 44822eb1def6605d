"""Figures of a rank's reported state (`GetState`): pages, blocks and rows in use."""

from collections.abc import Iterable, Mapping
from typing import Any

State = Mapping[str, Any]
FULL, WINDOW, STATES = "full", "window", "states"  # kinds of pools


def token_usage(rank: State) -> float:
    """Return the share of a rank's KV pages in use: neither free nor evictable."""
    return usage([rank])


def usage(pools: Iterable[State]) -> float:
    present = [(_available(pool), pool["total_pages"] - pool["reserved_pages"]) for pool in pools]
    total = sum(size for _, size in present)
    return 1 - sum(available for available, _ in present) / total if total else 0.0


def _available(pool: State) -> int:
    return int(pool["free_pages"] + evictable(pool))


def evictable(pool: State) -> int:
    return int(pool["cached_pages"] - pool["protected_pages"])


def used_tokens(rank: State) -> int:
    """Return the tokens of a rank's KV pages in use: neither free nor evictable."""
    return max_tokens(rank) - int(_available(rank) * rank["page_size"])


def max_tokens(rank: State) -> int:
    """Return the capacity of a rank's KV pages in tokens."""
    return int((rank["total_pages"] - rank["reserved_pages"]) * rank["page_size"])


def kind_of(pool: State) -> str:
    if pool["kind"] == "states":
        return STATES
    return FULL if None in pool["sliding_windows"] else WINDOW


def pool_names(rank: State) -> list[str]:
    """Return a name for each pool; for windows, with their widths in tokens."""
    return [
        "window " + " ".join(map(str, pool["sliding_windows"]))
        if kind_of(pool) == WINDOW
        else kind_of(pool)
        for pool in rank["pools"]
    ]


def page_states(pool: State) -> dict[str, int]:
    """Return the pages of a pool by state. All states before the last add up to it."""
    return {
        "free": pool["free_pages"],
        "leased": pool["leased_pages"],
        "cached_evictable": evictable(pool),
        "cached_protected": pool["protected_pages"],
        "session_held": pool["session_held_pages"],
        "reserved": pool["reserved_pages"],
        "total": pool["total_pages"],
    }


def host_block_states(pool: State) -> dict[str, int]:
    """Return the pages of a CPU-memory pool by state. All states before the last add up to it."""
    return {
        "free": pool["free_blocks"],
        "arriving": pool["arriving_blocks"],
        "cached_evictable": pool["cached_blocks"] - pool["leaving_blocks"],
        "leaving": pool["leaving_blocks"],
        "reserved": pool["reserved_blocks"],
        "total": pool["total_blocks"],
    }


def row_states(rank: State) -> dict[str, int]:
    """Return the rows of a rank by state. All states before the last add up to it."""
    total, free, session = rank["total_rows"], rank["free_rows"], rank["session_rows"]
    return {"free": free, "running": total - free - session, "session": session, "total": total}


def share(counters: Mapping[str, Any], part: str, whole: str) -> float:
    """Return the ratio of two counters, or 0 if `whole` is 0."""
    return float(counters.get(part, 0) / max(counters.get(whole, 0), 1))
