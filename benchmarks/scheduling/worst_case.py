"""Counts requests that wait although they fit next to the worst case of all running requests.

In the worst case each request takes all the pages that its limit allows, and shares none. Such a
request can start without any risk, if a row and prompt tokens of the step are left.
"""

from collections import Counter

import numpy as np

from sgl_jax.core.step_plan import StepPlan
from sgl_jax.scheduler.scheduler import Scheduler

_SAMPLE_INTERVAL = 4  # steps
_MOST_LOOKED_AT = 256  # waiting requests of a step, oldest first


class WorstCaseCheck:
    """Counts waiting requests after every fourth planned step, and those that could have started.

    Both count each request once per step: `num_waiting` in total, `could_start` by the scheduler's
    reason (`WaitReason.kind`).
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.num_waiting = 0
        self.could_start: Counter[str] = Counter()

    def after(self, plan: StepPlan) -> None:
        """Look at the requests that wait after `plan`."""
        scheduler = self._scheduler
        if plan.step_id % _SAMPLE_INTERVAL or not scheduler.num_waiting:
            return
        room = self._room(plan)
        for request, reason in scheduler.waiting_for(_MOST_LOOKED_AT):
            self.num_waiting += 1
            pinned = request.message.dp_rank
            most = max(room) if pinned is None else room[pinned]
            if scheduler.sizes.request_pages(request.max_kv_len) <= most:
                self.could_start[reason.kind] += 1

    def _room(self, plan: StepPlan) -> list[int]:
        """Return the pages of each rank that its running requests can never take.

        The value is -1 if a rank has no free row or no prompt tokens left.
        """
        sizes, room = self._scheduler.sizes, []
        for rank, rank_plan in zip(self._scheduler.ranks, plan.ranks, strict=True):
            num_chunked = int(rank_plan.q_lens[rank_plan.num_decode :].sum())
            if not rank.has_row or num_chunked >= sizes.max_chunk_tokens:
                room.append(-1)
                continue
            lens = rank.columns.max_len[rank.running.active] - 1
            if len(sizes.groups) == 1:
                taken = int((-(-lens // sizes.page_size)).sum())
            else:
                taken = sum(map(sizes.request_pages, np.asarray(lens).tolist()))
            room.append(sizes.pool_pages[0] - 1 - taken)
        return room
