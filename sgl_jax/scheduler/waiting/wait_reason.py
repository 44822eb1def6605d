"""The reason why a request waits."""

from typing import Literal, NamedTuple, get_args

WaitKind = Literal[
    "tenant",
    "prefix",
    "fetch",
    "store",
    "rank",
    "working_set",
    "step",
    "order",
    "pages",
    "images",
    "rows",
    "grammar",
    "program",
    "paused",
]
# The reasons that `count_kinds` counts, in its order: those of requests in the queue.
COUNTED_KINDS: tuple[WaitKind, ...] = get_args(WaitKind)[:11]


class WaitReason(NamedTuple):
    """The reason why a request waits, as of the last planned step.

    `kind` is

    - "step": it fits, but the step's prompt tokens are used up, memory was just retracted for other
      requests, or as many started as one step may start; the next step tries it again;
    - "rows", "pages": no rank that it may run on has a row, or none has enough pages; `pages_short`
      gives the missing pages by rank;
    - "images": it would fit on rank `dp_rank`, but its images do not fit in the table there next to
      those of running requests, or a request before it waits for that;
    - "prefix": request `behind` computes a prefix that it will read;
    - "fetch": a prefix that it will read is being fetched from the host to rank `dp_rank`;
    - "store": a prefix that it will read is being looked up in the store, or loaded from there to
      host memory of rank `dp_rank`;
    - "rank": it waits for room on rank `dp_rank`, which has more of its prefix than ranks with
      room;
    - "working_set": it would evict prefixes used lately, while most evicted prefixes return;
    - "order": the rank is held for request `behind`, which was passed over too often;
    - "tenant": its tenant runs as many requests as allowed;
    - "grammar": its grammar is being compiled, or waits for that;
    - "program": the programs of its steps are being compiled;
    - "paused": it waits for the end of a pause, or for fewer running requests under forced retracts
      (a test's setting).
    """

    kind: WaitKind
    pages_short: dict[int, int] = {}  # noqa: RUF012 (never written to)
    behind: str | None = None
    dp_rank: int | None = None

    def in_words(self) -> str:
        """Return the reason as a part of a sentence."""
        if self.kind == "pages":
            short = sorted(self.pages_short.items())
            (rank, count), *others = short
            first = f"{count} {'page' if count == 1 else 'pages'} short on rank {rank}"
            return ", ".join([first, *(f"{count} on rank {rank}" for rank, count in others)])
        words = _WORDS[self.kind]
        return words.format(behind=self.behind, dp_rank=self.dp_rank)


_WORDS = {
    "step": "it fits; the next step tries it again",
    "images": "its images do not fit in the table of rank {dp_rank} next to those in use",
    "rows": "no row is free",
    "prefix": "request {behind} computes a prefix that it will read",
    "fetch": "a prefix that it will read is on its way from the host to rank {dp_rank}",
    "store": "its prefix is searched in the store, or on its way from there",
    "rank": "rank {dp_rank} has more of its prefix than the ranks with room",
    "working_set": "it would evict prefixes that return soon",
    "order": "the rank is held for request {behind}",
    "tenant": "its tenant runs as many requests as allowed",
    "grammar": "its grammar is being compiled",
    "program": "the programs of its steps are being compiled",
    "paused": "generation is paused",
}
