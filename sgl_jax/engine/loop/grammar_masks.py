"""Masks of the tokens that grammars allow in a step."""

import numpy as np

from sgl_jax.core.messages import AbortRequest
from sgl_jax.core.step_plan import Int32Array, StepPlan, mask_words
from sgl_jax.scheduler.events import Expect
from sgl_jax.scheduler.scheduler import Scheduler

_GIVEN_UP = "the output could not be held to its grammar any longer: "


def step_masks(plan: StepPlan, scheduler: Scheduler) -> list[Int32Array]:
    """Return the masks of a masked step in flight. All earlier results must have been read.

    For each rank int32[rows, 1 + max_draft_tokens, words], one bit per token of the vocabulary; all
    bits are set for a row without a grammar. Tokens that a grammar forces become scheduler events,
    and so does the end of a request if its grammar failed.
    """
    sizes = scheduler.sizes
    shape = (1 + sizes.max_draft_tokens, mask_words(sizes.vocab_size))
    given_up: list[AbortRequest] = []
    masks = [np.full((len(rank.rows), *shape), -1, np.int32) for rank in plan.ranks]
    for dp_rank, index, request, output in scheduler.rows_with_grammar(plan):
        matcher, drafts = request.matcher, plan.ranks[dp_rank].known_drafts(index)
        matcher.read(output)
        expected = matcher.expected() if sizes.max_draft_tokens else ()
        if len(expected) > 1:  # the step draws the first
            first = request.prompt_len + len(output)
            forced = np.array(expected, np.int32)
            scheduler.handle(Expect(request.rid, first, forced))
        matcher.masks(drafts, masks[dp_rank][index, : 1 + len(drafts)])
        if matcher.error:
            why = _GIVEN_UP + matcher.error
            given_up.append(AbortRequest(rid=request.rid, message=why, status_code=400))
    for message in given_up:
        scheduler.handle(message)
    return masks
