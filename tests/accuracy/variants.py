"""The ways a server can be run that must not change what it answers, and which of them to try.

In `SOME` every value of every axis occurs, except the larger chunks and drafts of a layer.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tests.accuracy.served_models import DENSE, HYBRID, ServedModel
from tests.support.covering import covering

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
LAYER = "a draft layer"
# The reference has chunks of 128.
AXES: tuple[tuple[Any, ...], ...] = (
    *((1, 16), (True, False), (32, 1024), (True, False), (1, 2)),
    ("none", "NGRAM", LAYER),
)
SOME = (
    Variant(1, True, 32, True, 2, "NGRAM"),
    Variant(16, False, 32, False, 1, "none"),
)
# What every answer is compared with: nothing clever, nothing retracted.
REFERENCE = Variant(16, False, 128, False, 1, "none")


def variants() -> list[tuple[ServedModel, Variant]]:
    """Return models and variants: every two settings occur together, the model being one.

    Each is served with retracts and without, so these occur with every two as well. The whole
    product has 192 variants and takes hours.
    """
    rows = covering(((DENSE, HYBRID), *AXES), 2, [(DENSE, *variant) for variant in SOME])
    found = [
        (model, Variant._make((*rest, model.draft_layer if drafts == LAYER else drafts)))
        for model, *rest, drafts in rows
    ]
    # Variants of the same shapes follow each other and share what was compiled.
    return sorted(found, key=lambda own: (own[0].name, own[1].page_size, own[1].chunk, own[1].dp))
