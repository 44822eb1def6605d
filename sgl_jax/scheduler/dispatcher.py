"""Which waiting requests start in the step being planned, and on which rank."""

from collections.abc import Sequence

from sgl_jax.scheduler.balancer import Balancer, Candidate
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.step_planner import StepDraft
from sgl_jax.scheduler.waiting_queue import WaitingQueue


class Dispatcher:
    """Hands waiting requests to ranks with room; `method` is the balancer's."""

    def __init__(self, ranks: Sequence[RankScheduler], method: str) -> None:
        self._ranks = ranks
        self._balancer = Balancer(method, len(ranks))

    def admit(self, waiting: WaitingQueue, drafts: Sequence[StepDraft]) -> None:
        """Start waiting requests, in the queue's order, until no rank's draft takes one more."""
        for request in waiting.ordered([d.rank.dp_rank for d in drafts if d.can_admit]):
            while True:
                ranks = [
                    rank
                    for rank in self._ranks
                    if drafts[rank.dp_rank].can_admit and request.dp_rank in (None, rank.dp_rank)
                ]
                if not ranks:
                    break
                if drafts[self._choose_rank(ranks, request)].admit(request):
                    waiting.remove(request)
                    break
            if not any(draft.can_admit for draft in drafts):
                return

    def best_cached_len(self, request: Request) -> int:
        """Tokens of the request's prefix that the best of the ranks it may run on has cached."""
        if request.dp_rank is not None:
            return self._ranks[request.dp_rank].cached_len(request)
        return max(rank.cached_len(request) for rank in self._ranks)

    def _choose_rank(self, ranks: list[RankScheduler], request: Request) -> int:
        """One of `ranks`, any of which may take the request."""
        # To look a long prompt up is work; it is done only if something depends on it.
        is_looked_up = len(ranks) > 1 and self._balancer.uses_cached_len
        return self._balancer.choose(
            [
                Candidate(
                    rank.dp_rank,
                    len(rank.running),
                    rank.cached_len(request) if is_looked_up else 0,
                )
                for rank in ranks
            ]
        )
