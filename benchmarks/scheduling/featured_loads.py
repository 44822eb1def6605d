"""Loads that the reference does not support: priorities, shares, drafts, windows, states, tiers."""

from typing import Any

from benchmarks.scheduling.clients import Tail, closed_loop, open_loop, requests, sessions
from benchmarks.scheduling.traffic import FEWER_RETRACTS, Load
from sgl_jax.core.engine_sizes import LAST_VALUE, CacheGroup

_PRIORITIES = {"enable_priority_scheduling": True}
_SHARES = {"fair_share": "tokens"}
# Half of the layers see 512 tokens. Both kinds take pages of one pool.
_WINDOWS = {"groups": (CacheGroup(None), CacheGroup(512))}


def _states(pool_tokens: int, num_snapshots: int, page_size: int = 16) -> dict[str, Any]:
    """Return sizes of a model with recurrent layers and a pool of `num_snapshots` states."""
    return {
        "groups": (CacheGroup(None), CacheGroup(LAST_VALUE, 1, (), True)),
        "pool_pages": (1 + pool_tokens // page_size, 1 + num_snapshots),
        "snapshot_interval": 512,
        "tail_interval": 64,
        "max_step_snapshots": 64,
    }


FEATURED = [
    Load(
        "priorities",
        "40 clients of low and eight of high priority in 8k tokens",
        lambda: [
            *closed_loop(40, requests("low", 150, (50, 250), 512)),
            *closed_loop(
                8, requests("high", 60, (20, 60), 128, priority=100), first=40, think_s=0.1
            ),
        ],
        15.0,
        pool_tokens=8_192,
        args=_PRIORITIES,
    ),
    Load(
        "priorities-ageing",
        "three priorities, one level for each second of waiting, in 8k tokens",
        lambda: [
            *closed_loop(24, requests("low", 150, (50, 250), 512)),
            *closed_loop(24, requests("middle", 150, (50, 250), 512, priority=2), first=24),
            *closed_loop(24, requests("high", 150, (50, 250), 512, priority=4), first=48),
        ],
        15.0,
        pool_tokens=8_192,
        args={**_PRIORITIES, "priority_aging_s": 1.0},
    ),
    Load(
        "priority-bursts",
        "eight streams of 1,500 of low priority, bursts of 20 of high priority in 16k tokens",
        lambda: [
            *closed_loop(8, requests("stream", 100, 1_500, 2_048)),
            *open_loop(
                300, requests("high", 200, (20, 60), 128, priority=50), 20.0, first=8, burst=20
            ),
        ],
        15.0,
        pool_tokens=16_384,
        args=_PRIORITIES,
    ),
    Load(
        "shares",
        "two tenants with 60 and 6 clients of 200 + 50 to 150 in 8k tokens",
        lambda: [
            *closed_loop(60, requests("many", 200, (50, 150), 256, tenant="many")),
            *closed_loop(6, requests("few", 200, (50, 150), 256, tenant="few"), first=60),
        ],
        15.0,
        pool_tokens=8_192,
        args=_SHARES,
    ),
    Load(
        "shares-prefixes",
        "four tenants with 16 clients each and 30 prefixes of 1,000 in 24k tokens",
        lambda: [
            client
            for number in range(4)
            for client in closed_loop(
                16,
                requests(
                    f"tenant {number}",
                    80,
                    (30, 90),
                    128,
                    prefixes=(30, 1_000),
                    tenant=f"tenant {number}",
                ),
                first=16 * number,
            )
        ],
        15.0,
        pool_tokens=24_576,
        args=_SHARES,
    ),
    Load(
        "shares-overload",
        "150 requests a second of one tenant, ten of another, in 16k tokens",
        lambda: [
            *open_loop(1_500, requests("many", 200, (50, 150), 256, tenant="many"), 150.0),
            *open_loop(100, requests("few", 200, (50, 150), 256, tenant="few"), 10.0, first=1_500),
        ],
        12.0,
        pool_tokens=16_384,
        num_rows=64,
        args=_SHARES,
    ),
    Load(
        "drafts",
        "48 clients of 200 + 100 to 300 (limit 512), three drafts a step, in 16k tokens",
        lambda: closed_loop(48, requests("chat", 200, (100, 300), 512)),
        10.0,
        pool_tokens=16_384,
        sizes={"max_draft_tokens": 3, "max_step_tokens": 2_048 + 4 * 256},
    ),
    Load(
        "drafts-equal",
        "100 clients of 100 + 400 by their limit, three drafts a step, in 24k tokens",
        lambda: closed_loop(100, requests("equal", 100, 400)),
        10.0,
        pool_tokens=24_576,
        sizes={"max_draft_tokens": 3, "max_step_tokens": 2_048 + 4 * 256},
    ),
    Load(
        "windows",
        "40 clients of 300 + 100 to 500, half of the layers with windows of 512, in 32k tokens",
        lambda: closed_loop(40, requests("chat", 300, (100, 500), 1_024)),
        15.0,
        pool_tokens=32_768,
        sizes=_WINDOWS,
        reason=FEWER_RETRACTS,
    ),
    Load(
        "windows-long",
        "two prompts of 6,000 next to 24 clients of 100 + 200 to 800, windows of 512, in 32k",
        lambda: [
            *closed_loop(2, requests("long", 6_000, 200), think_s=0.5),
            *closed_loop(24, requests("chat", 100, (200, 800), 1_024), first=2),
        ],
        15.0,
        pool_tokens=32_768,
        sizes=_WINDOWS,
        reason=FEWER_RETRACTS,
    ),
    Load(
        "states",
        "48 clients of 200 + 50 to 250 with recurrent layers, 96 kept states, in 16k tokens",
        lambda: closed_loop(48, requests("chat", 200, (50, 250), 512)),
        15.0,
        pool_tokens=16_384,
        sizes=_states(16_384, 96),
    ),
    Load(
        "states-sessions",
        "32 sessions of 100 + 50 to 150 with recurrent layers, 64 kept states, in 12k tokens",
        lambda: sessions(32, requests("turn", 100, (50, 150), 256), turns=(3, 8), think_s=0.2),
        20.0,
        pool_tokens=12_288,
        sizes=_states(12_288, 64),
    ),
    Load(
        "host-sessions",
        "48 sessions of 300 + 100 to 300 in 32k tokens and four times as much in host memory",
        lambda: sessions(48, requests("turn", 300, (100, 300), 512), turns=(4, 10), think_s=1.0),
        30.0,
        pool_tokens=32_768,
        sizes={"host_blocks": (1 + 4 * 32_768 // 16,)},
    ),
    Load(
        "host-prefixes",
        "48 clients, 60 prefixes of 2,000, own 100 + 30 to 90 in 32k tokens and 4 times the host's",
        lambda: closed_loop(48, requests("tool", 100, (30, 90), 128, prefixes=(60, 2_000))),
        20.0,
        pool_tokens=32_768,
        page_size=128,
        sizes={"host_blocks": (1 + 4 * 32_768 // 128,)},
    ),
    Load(
        "host-tail",
        "64 clients, outputs of median 150 with a long tail, as much again in host memory",
        lambda: closed_loop(64, requests("chat", (50, 300), Tail(150, 1.0, 4_096), 4_096)),
        20.0,
        pool_tokens=24_576,
        sizes={"host_blocks": (1 + 24_576 // 16,)},
        reason=FEWER_RETRACTS,
    ),
]
