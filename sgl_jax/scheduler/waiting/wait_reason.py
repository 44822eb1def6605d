"""The reason why a request waits, and the number of requests by reason."""

from typing import Literal, NamedTuple

WaitKind = Literal[
    "step", "rows", "pages", "prefix", "rank", "order", "tenant", "program", "paused"
]


class WaitReason(NamedTuple):
    """The reason why a waiting request waits, as of the last planned step.

    `kind` is

    - "step": it fits, but the step's prompt tokens are used up, or memory was just retracted for
      others; the next step tries it again;
    - "rows", "pages": no rank that it may run on has a row, or none has enough pages; `pages_short`
      gives the missing pages by rank;
    - "prefix": request `behind` computes a prefix that it will read;
    - "rank": it waits for room on rank `dp_rank`, which has more of its prefix than ranks with
      room;
    - "order": the rank is held for request `behind`, which was passed over too often;
    - "tenant": its tenant runs as many requests as allowed;
    - "program": programs of steps with a grammar are being compiled;
    - "paused": it waits for the end of a pause, or for fewer running requests under forced retracts
      (a test's setting).
    """

    kind: WaitKind
    pages_short: dict[int, int] = {}  # noqa: RUF012 (never written to)
    behind: str | None = None
    dp_rank: int | None = None
