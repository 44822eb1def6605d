"""The ways a server can be run that must not change what it answers, and which of them to try.

In `SOME` every value of every axis occurs, except the larger chunks.
"""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

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
AXES: tuple[tuple[Any, ...], ...] = (
    *((1, 16), (True, False), (32, 128, 1024), (True, False), (1, 2)),
    ("none", "NGRAM"),
)
SOME = (
    Variant(1, True, 32, True, 2, "NGRAM"),
    Variant(16, False, 32, False, 1, "none"),
)
# What every answer is compared with: nothing clever, nothing retracted.
REFERENCE = Variant(16, False, 128, False, 1, "none")


def variants(draft_layer: str) -> list[Variant]:
    """Return variants in which every three values of different axes occur together.

    A covering array of strength 3: a greedy choice, from `SOME`, of the variant that adds the most
    triples. It has a seventh of the variants of the whole product, which takes hours.

    Args:
        draft_layer: the third speculative algorithm, MTP or EAGLE3.
    """
    *others, speculation = AXES
    product = [Variant(*v) for v in itertools.product(*others, (*speculation, draft_layer))]
    uncovered = set().union(*map(_triples, product))
    chosen: list[Variant] = []
    for variant in SOME:
        chosen.append(variant)
        uncovered -= _triples(variant)
    while uncovered:
        chosen.append(max(product, key=lambda v: len(_triples(v) & uncovered)))
        uncovered -= _triples(chosen[-1])
    # Variants of the same shapes follow each other and share what was compiled.
    return sorted(chosen, key=lambda v: (v.page_size, v.chunk, v.dp, v.speculation))


def _triples(variant: Variant) -> set[tuple[tuple[int, object], ...]]:
    """Return the sets of three settings in `variant`, each with the number of its axis."""
    return {*itertools.combinations(enumerate(variant), 3)}
