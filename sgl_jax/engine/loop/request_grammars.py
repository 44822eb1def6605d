"""Compiles the grammar of each request outside the engine loop, while the request waits.

Between two steps the loop sends the scheduler a `GrammarReady` event for each finished compilation.
From then on the request holds a matcher, so a step never waits for one.
"""

from collections import deque

import numpy as np
from llguidance import LLMatcher

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import AbortRequest, GenerateRequest
from sgl_jax.core.shares import holder_of, tenant_text
from sgl_jax.core.step_plan import Int32Array, StepPlan, mask_words
from sgl_jax.grammar.compile_queue import CompileQueue, Job
from sgl_jax.grammar.compiler import GrammarCompiler
from sgl_jax.scheduler.events import Expect, GrammarReady
from sgl_jax.scheduler.scheduler import Scheduler

# Requests that get their grammar in one turn of the loop: some milliseconds of host time.
_MAX_HANDED_OUT = 256


class RequestGrammars:
    """The grammars of the requests of `scheduler`.

    Attributes:
        queue: the grammars to compile. Call `hand_out` while `queue.ended` is not empty.
        ended: requests with a finished compilation that has not been delivered yet.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        compiler: GrammarCompiler,
        max_queued: int,
        *,
        has_shares: bool,
    ) -> None:
        self._scheduler = scheduler
        self._compiler = compiler
        self._has_shares = has_shares
        self.ended: deque[tuple[str, Job]] = deque()
        self.queue = CompileQueue(
            compiler.compile, scheduler.awaits_grammar, max_queued, has_shares=has_shares
        )

    @property
    def is_busy(self) -> bool:
        return bool(self.ended) or bool(self.queue)

    def begin(self, message: GenerateRequest) -> None:
        """Compile the grammar, if any, of a request that the scheduler has just received."""
        grammar = message.sampling.grammar
        request = self._scheduler.awaits_grammar(message.rid)
        if grammar is None or request is None or request.message.sampling is not message.sampling:
            return  # refused, perhaps because another request has this id
        holder = holder_of(message.tenant)
        matcher = self.queue.find(grammar)
        if matcher is not None:
            self._pass_on(message.rid, matcher)
        elif not self.queue.add(grammar, message.rid, holder):
            is_of_holder = self._has_shares or bool(holder)
            full = _queue_full(tenant_text(holder) if is_of_holder else None)
            self._scheduler.handle(GrammarReady(message.rid, full))

    def hand_out(self) -> None:
        """Deliver compiled grammars and end refused requests, up to `_MAX_HANDED_OUT` requests."""
        if self.queue.ended:
            self.ended += [(rid, job) for job in self.queue.take() for rid, _ in job.requests]
        for _ in range(min(len(self.ended), _MAX_HANDED_OUT)):
            rid, job = self.ended.popleft()
            if job.matcher is not None:
                self._pass_on(rid, job.matcher)
            else:
                self._scheduler.handle(GrammarReady(rid, _refusal(job)))

    def _pass_on(self, rid: str, matcher: LLMatcher) -> None:
        request = self._scheduler.awaits_grammar(rid)
        if request is not None:  # None: its client has left
            request.matcher = self._compiler.follow(matcher)
            self._scheduler.handle(GrammarReady(rid))


def _refusal(job: Job) -> FinishReason:
    status_code, param = 500, None
    if isinstance(job.error, InvalidRequestError):
        status_code, param = 400, job.error.param
    return FinishReason("abort", message=str(job.error), status_code=status_code, param=param)


def _queue_full(whose: str | None) -> FinishReason:
    if whose is None:
        text = "too many grammars wait to be compiled"
        return FinishReason("abort", message=text, status_code=503, code="queue_full")
    text = f"too many grammars of {whose} wait to be compiled"
    return FinishReason("abort", message=text, status_code=429, code="tenant_queue_full")


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
