"""Watches a server through the soak as an operator does: metrics each second, and the memory view.

Every scrape and every frame must add up by itself, in the midst of steps.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

_SCRAPE_EVERY_S = 1.0


class Watcher:
    """An asynchronous context manager; `failures` lists what did not add up."""

    kinds = ("scrapes", "frames", "trees")

    def __init__(self, url: str) -> None:
        self._url = url
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.failures: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Watcher":
        self._http = httpx.AsyncClient(base_url=self._url, timeout=30)
        self._tasks = [asyncio.create_task(self._scrape()), asyncio.create_task(self._view())]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                self.failures.append(f"watching ended: {type(ended).__name__}: {ended}")
        await self._http.aclose()

    async def _scrape(self) -> None:
        while True:
            text = (await self._http.get("/metrics")).raise_for_status().text
            self.failures += unbalanced_pools(text)
            self.counts["scrapes"] += 1
            await asyncio.sleep(_SCRAPE_EVERY_S)

    async def _view(self) -> None:
        pages: dict[tuple[int, int], list[int]] = {}
        async with self._http.stream("GET", "/memory/events", timeout=None) as answer:
            kind = ""
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: ") and kind == "frame":
                    frame = json.loads(line.removeprefix("data: "))
                    self.failures += unbalanced_frame(frame, pages)
                    self.counts["frames"] += 1
                elif line.startswith("data: "):
                    self.counts["trees"] += 1


def unbalanced_pools(exposition: str) -> list[str]:
    """The pools of a scrape whose states do not add up to their total."""
    pools: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == "sglang:kv_pages":
                place = sample.labels["dp_rank"], sample.labels["pool"]
                pools.setdefault(place, {})[sample.labels["state"]] = sample.value
    wrong = [] if pools else ["a scrape has no kv_pages"]
    for place, states in pools.items():
        total = states.pop("total")
        if sum(states.values()) != total or min(states.values()) < 0:
            wrong.append(f"pool {place}: {states} do not add up to {total}")
    return wrong


def unbalanced_frame(
    frame: Mapping[str, Any], pages: dict[tuple[int, int], list[int]]
) -> list[str]:
    """Differences between a frame's counts and its page map, which `pages` holds between frames."""
    wrong = []
    for rank in frame["ranks"]:
        idle = {lease["row"] for lease in rank["leases"] if lease["is_idle"]}
        if not rank["is_closed"]:
            wrong.append(f"rank {rank['dp_rank']}: {rank['defect']}")
        for number, pool in enumerate(rank["pools"]):
            codes = pages.setdefault((rank["dp_rank"], number), [0] * pool["num_pages"])
            for first, count, code in pool["runs"]:
                codes[first : first + count] = [code] * count
            found = Counter(
                _STATE_OF_CODE.get(code) or ("session_held" if code in idle else "leased")
                for code in codes
            )
            counts = dict(pool["pages"])
            counts["total"] -= sum(found.values())
            if any(counts[name] != found[name] for name in counts if name != "total"):
                wrong.append(f"frame {frame['number']}: {counts} in numbers, {found} on the map")
            if counts["total"]:
                wrong.append(f"frame {frame['number']}: the map lacks {counts['total']} pages")
    return wrong


_STATE_OF_CODE = {0: "free", -1: "reserved", -2: "cached_evictable", -3: "cached_protected"}
