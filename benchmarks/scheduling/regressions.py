"""Loads that the scheduler once served much worse than a simple rule."""

from benchmarks.scheduling.clients import closed_loop, requests
from benchmarks.scheduling.traffic import DUE_BY_SERVICE, FEWER_RETRACTS, Load

REGRESSIONS = [
    Load(
        "aborts-16",
        "100 clients that abort after 10 to 49 of 4,096 tokens",
        lambda: closed_loop(100, requests("short", (50, 200), 4096, 4096, abort_after=(10, 49))),
        20.0,
        pool_tokens=16_384,
    ),
    Load(
        "aborts-128",
        "the same, pages of 128",
        lambda: closed_loop(100, requests("short", (50, 200), 4096, 4096, abort_after=(10, 49))),
        20.0,
        pool_tokens=16_384,
        page_size=128,
    ),
    *(
        Load(
            f"full-rank-{page_size}",
            f"dp 2: one request fills rank 0, 48 clients of 80 + 10 to 24; pages of {page_size}",
            lambda: [
                *closed_loop(1, requests("pinned", 7_700, 400, dp_rank=0), most=1),
                *closed_loop(48, requests("short", 80, (10, 24), 24), first=1),
            ],
            2.5,
            pool_tokens=8_192,
            page_size=page_size,
            dp_size=2,
        )
        for page_size in (16, 128)
    ),
    Load(
        "short-next-to-long",
        "one output of 1,900 and six clients of 8 + 4 in 2k tokens",
        lambda: [
            *closed_loop(1, requests("long", 20, 1_900)),
            *closed_loop(6, requests("short", 8, 4), first=1),
        ],
        14.0,
        pool_tokens=2_048,
    ),
    Load(
        "short-next-to-six",
        "six of 200 + 2,000 to 3,500 and sixteen of 50 + 8 to 24 in 16k tokens",
        lambda: [
            *closed_loop(6, requests("long", 200, (2_000, 3_500), 4_096)),
            *closed_loop(16, requests("short", 50, (8, 24), 32), first=6),
        ],
        40.0,
        pool_tokens=16_384,
    ),
    Load(
        "thinkers",
        "twelve of 400 + 4,000 to 12,000 (limit 16k) and 24 of 100 + 20 to 60 in 60k tokens",
        lambda: [
            *closed_loop(12, requests("thinker", 400, (4_000, 12_000), 16_384)),
            *closed_loop(24, requests("short", 100, (20, 60), 128), first=12, think_s=0.05),
        ],
        60.0,
        pool_tokens=61_440,
        context=32_768,
    ),
    Load(
        "large-prompt",
        "one prompt of 30k next to eight outputs of 1,500 to 2,500 in 32k tokens",
        lambda: [
            *closed_loop(8, requests("stream", 50, (1_500, 2_500), 2_560)),
            *closed_loop(1, requests("large", 30_000, 100), first=8, start_s=1.0, think_s=1.0),
        ],
        130.0,
        pool_tokens=32_768,
        reason=DUE_BY_SERVICE,
    ),
    Load(
        "retracted-long",
        "three outputs of 6,500 and sixteen clients of 50 + 8 to 24 in 16k tokens",
        lambda: [
            *closed_loop(3, requests("long", 200, 6_500, 8_192)),
            *closed_loop(16, requests("short", 50, (8, 24), 32), first=3),
        ],
        60.0,
        pool_tokens=16_384,
    ),
    Load(
        "retracted-long-4k",
        "three outputs of 1,700 and eight clients of 20 + 8 to 24 in 4k tokens",
        lambda: [
            *closed_loop(3, requests("long", 50, 1_700, 2_048)),
            *closed_loop(8, requests("short", 20, (8, 24), 32), first=3),
        ],
        30.0,
        pool_tokens=4_096,
    ),
    Load(
        "lockstep",
        "256 clients of 100 + 500, by their limit, in 60k tokens",
        lambda: closed_loop(256, requests("equal", 100, 500)),
        30.0,
        pool_tokens=61_440,
        reason=FEWER_RETRACTS,
    ),
    Load(
        "end-at-a-page",
        "dp 2: 72 clients of 53 + 12 by their limit; only the last token is past four pages",
        lambda: closed_loop(72, requests("equal", 53, 12), stagger_s=0.01),
        6.0,
        pool_tokens=2_080,
        dp_size=2,
        chunk_tokens=256,
    ),
    Load(
        "preempted-stream",
        "a stream of 1,900 of low priority and two clients of 8 + 40 (limit 64) of high priority",
        lambda: [
            *closed_loop(1, requests("low", 20, 1_900)),
            *closed_loop(2, requests("high", 8, 40, 64, priority=100), first=1, think_s=0.1),
        ],
        20.0,
        pool_tokens=2_048,
        args={"enable_priority_scheduling": True, "disable_radix_cache": True},
    ),
    Load(
        "cold-start",
        "200 requests at once, limit 4,096, outputs of 10 to 50, in 16k tokens",
        lambda: closed_loop(200, requests("burst", (50, 100), (10, 50), 4_096), most=1),
        60.0,
        pool_tokens=16_384,
    ),
    Load(
        "uneven-ranks",
        "dp 2: rank 0 nearly full of pinned streams, 40 clients of 80 + 100 to 200",
        lambda: [
            *closed_loop(3, requests("pinned", 500, 2_000, 2_048, dp_rank=0)),
            *closed_loop(48, requests("short", 80, (100, 200), 256), first=3),
        ],
        20.0,
        pool_tokens=8_192,
        dp_size=2,
    ),
    Load(
        "long-prompt",
        "prompts of 8 tokens next to one of 4,000, at 32 prompt tokens a step",
        lambda: [
            *closed_loop(1, requests("long", 4_000, 8)),
            *closed_loop(4, requests("short", 8, 4), first=1, start_s=0.01, think_s=0.02),
        ],
        10.0,
        pool_tokens=16_384,
        chunk_tokens=32,
    ),
]
