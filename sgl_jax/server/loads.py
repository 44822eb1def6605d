"""The load of each rank in SGLang's words, made from the engine's state (`EngineCore.state`)."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sgl_jax.metrics.engine_metrics import token_usage

# What `/v1/loads?include=` may name; "core" is always there, "all" is every one.
SECTIONS = ("core", "memory", "spec", "queues", "all")


def loads_of(state: Mapping[str, Any], sections: Collection[str]) -> list[dict[str, Any]]:
    """The load of every rank, with those of `SECTIONS` that are asked for.

    Counts are of requests and tokens; `gen_throughput` is output tokens a second of all ranks
    together, as of the engine's last line of statistics.
    """
    counters = state["counters"]
    is_wanted = {name: name in sections or "all" in sections for name in SECTIONS}
    now = time.time()
    loads = []
    for rank in state["ranks"]:
        num_running, num_waiting = rank["num_running"], rank["num_waiting"]
        load = {
            "dp_rank": rank["dp_rank"],
            "timestamp": now,
            "num_running_reqs": num_running,
            "num_waiting_reqs": num_waiting,
            "num_total_reqs": num_running + num_waiting,
            "num_used_tokens": num_used_tokens(rank),
            "max_total_num_tokens": max_tokens(rank),
            "token_usage": token_usage(rank),
            "gen_throughput": counters.get("gen_throughput", 0.0),
            "cache_hit_rate": _share(counters, "cached_tokens", "prompt_tokens"),
            "max_running_requests": rank["total_rows"],
            "utilization": num_running / max(rank["total_rows"], 1),
        }
        if is_wanted["memory"]:
            pages = {name: count for name, count in rank.items() if name.endswith("_pages")}
            load["memory"] = {"token_capacity": max_tokens(rank), **pages}
        if is_wanted["spec"]:
            accepted = _share(counters, "accepted_draft_tokens", "drafted_tokens")
            load["speculative"] = {"accept_rate": accepted}
        if is_wanted["queues"]:
            load["queues"] = {"waiting": num_waiting}
        loads.append(load)
    return loads


def aggregate(loads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums and means over the ranks of `loads`."""
    count = max(len(loads), 1)
    return {
        "total_running_reqs": sum(load["num_running_reqs"] for load in loads),
        "total_waiting_reqs": sum(load["num_waiting_reqs"] for load in loads),
        "total_reqs": sum(load["num_total_reqs"] for load in loads),
        "avg_token_usage": sum(load["token_usage"] for load in loads) / count,
        "avg_throughput": sum(load["gen_throughput"] for load in loads) / count,
        "avg_utilization": sum(load["utilization"] for load in loads) / count,
    }


def internal_state(rank: Mapping[str, Any], counters: Mapping[str, Any]) -> dict[str, Any]:
    """One of `/server_info`'s `internal_states`, as benches and routers read it."""
    return {
        "dp_rank": rank["dp_rank"],
        "last_gen_throughput": counters.get("gen_throughput", 0.0),
        "effective_max_running_requests_per_dp": rank["total_rows"],
        "load": rank["num_running"] + rank["num_waiting"],
        "memory_usage": {"token_capacity": max_tokens(rank), "token_usage": token_usage(rank)},
    }


def num_used_tokens(rank: Mapping[str, Any]) -> int:
    """Tokens that the pages of running requests and sessions hold."""
    held = rank["leased_pages"] + rank["session_held_pages"]
    return int(held * rank["page_size"])


def max_tokens(rank: Mapping[str, Any]) -> int:
    """Tokens that a rank's pages hold, but for the reserved ones."""
    return int((rank["total_pages"] - rank["reserved_pages"]) * rank["page_size"])


def _share(counters: Mapping[str, Any], part: str, whole: str) -> float:
    return float(counters.get(part, 0) / max(counters.get(whole, 0), 1))
