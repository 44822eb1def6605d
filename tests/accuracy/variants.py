"""The ways a server can be run that must not change what it answers, and which of them to try.

Data only. `ALL` is the whole matrix; in `SOME` every value of every axis occurs, but for
the larger chunks.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

EAGLE3_HEAD = Path(__file__).parents[2] / "models" / "demo_eagle3"


class Variant(NamedTuple):
    """One setting of every axis."""

    page_size: int
    radix: bool
    chunk: int
    overlap: bool
    dp: int
    speculation: str  # the algorithm, or none

    @property
    def name(self) -> str:
        """Short, and fit for the id of a test."""
        return "-".join(
            (
                f"page{self.page_size}",
                "radix" if self.radix else "chunkcache",
                f"chunk{self.chunk}",
                "overlap" if self.overlap else "sync",
                f"dp{self.dp}",
                self.speculation.lower() if self.speculation != "none" else "plain",
            )
        )

    @property
    def flags(self) -> tuple[str, ...]:
        """As the server takes them; without retract."""
        flags = [
            *("--page-size", str(self.page_size), "--dp-size", str(self.dp)),
            *("--chunked-prefill-size", str(self.chunk)),
            *("--max-total-tokens", str(POOL_TOKENS // self.dp)),
        ]
        if not self.radix:
            flags.append("--disable-radix-cache")
        if not self.overlap:
            flags.append("--disable-overlap-schedule")
        if self.speculation != "none":
            algorithm = ("--speculative-algorithm", self.speculation)
            flags += [*algorithm, "--speculative-num-draft-tokens", "4"]
        if self.speculation == "EAGLE3":
            flags += ["--speculative-draft-model-path", str(EAGLE3_HEAD)]
        return (*COMMON_FLAGS, *flags)

    @property
    def retract_flags(self) -> tuple[str, ...]:
        """What makes the server retract though memory suffices.

        Small chunks without a prefix cache compute a long prompt for dozens of steps after each
        retract: there it happens less often, or the test would do little else.
        """
        interval = 12 if self.chunk == 32 and not self.radix else 3
        return ("--test-retract", "--test-retract-interval", str(interval))


# Over all ranks. Holds what runs at once, but not the prefixes of all questions: pages are evicted.
POOL_TOKENS = 6144
COMMON_FLAGS = (
    *("--served-model-name", "demo", "--context-length", "1280", "--max-running-requests", "8"),
    *("--check-memory", "busy", "--memory-error-action", "crash", "--decode-log-interval", "0"),
)
AXES = (
    *((1, 16), (True, False), (32, 128, 1024), (True, False), (1, 2)),
    ("none", "NGRAM", "MTP", "EAGLE3"),
)
# The innermost axes need no programs of their own, so that neighbours share what was compiled.
ALL = sorted(
    (Variant(*values) for values in itertools.product(*AXES)),
    key=lambda v: (v.page_size, v.chunk, v.dp, v.speculation),
)
SOME = (
    Variant(1, True, 32, True, 2, "NGRAM"),
    Variant(16, False, 32, False, 1, "none"),
)
# What every answer is compared with: nothing clever, nothing retracted.
REFERENCE = Variant(16, False, 128, False, 1, "none")
