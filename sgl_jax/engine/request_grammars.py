"""Compiles the grammar of each request beside the engine loop, while the request waits at the gate.

Between two steps the loop sends the scheduler an event (`GrammarReady`) for each finished
compilation. From then on the request holds its own matcher, so a step never waits for one.
"""

from llguidance import LLMatcher

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.grammar.compile_queue import CompileQueue, Job
from sgl_jax.grammar.compiler import GrammarCompiler
from sgl_jax.scheduler.record.events import GrammarReady
from sgl_jax.scheduler.scheduler import Scheduler


class RequestGrammars:
    """The grammars of the requests of `scheduler`.

    Attributes:
        queue: the grammars to compile; `hand_out` is needed while `queue.ended` has any.
    """

    def __init__(self, scheduler: Scheduler, compiler: GrammarCompiler, max_queued: int) -> None:
        """`max_queued`: as for `CompileQueue`."""
        self._scheduler = scheduler
        self._compiler = compiler
        self.queue = CompileQueue(compiler.compile, scheduler.awaits_grammar, max_queued)

    def begin(self, message: GenerateRequest) -> None:
        """Compile the grammar of a request that the scheduler has just got, if it has one."""
        grammar = message.sampling.grammar
        request = self._scheduler.awaits_grammar(message.rid)
        if grammar is None or request is None or request.message.sampling is not message.sampling:
            return  # it was refused, perhaps because another request has its id
        tenant = "" if message.tenant is None else message.tenant.name
        matcher = self.queue.find(grammar)
        if matcher is not None:
            self._pass_on(message.rid, matcher)
        elif not self.queue.add(grammar, message.rid, tenant):
            self._scheduler.handle(GrammarReady(message.rid, _queue_full(tenant)))

    def hand_out(self) -> None:
        """Pass on the compiled grammars, and end the requests whose grammar is refused."""
        for job in self.queue.take():
            for rid, _ in job.requests:
                if job.matcher is not None:
                    self._pass_on(rid, job.matcher)
                else:
                    self._scheduler.handle(GrammarReady(rid, _refusal(job)))

    def _pass_on(self, rid: str, matcher: LLMatcher) -> None:
        request = self._scheduler.awaits_grammar(rid)
        if request is not None:  # else its client has left
            request.matcher = self._compiler.follow(matcher)
            self._scheduler.handle(GrammarReady(rid))


def _refusal(job: Job) -> FinishReason:
    status_code, param = 500, None
    if isinstance(job.error, InvalidRequestError):
        status_code, param = 400, job.error.param
    return FinishReason("abort", message=str(job.error), status_code=status_code, param=param)


def _queue_full(tenant: str) -> FinishReason:
    if not tenant:
        text = "too many grammars wait to be compiled"
        return FinishReason("abort", message=text, status_code=503, code="queue_full")
    text = f"too many grammars of tenant {tenant!r} wait to be compiled"
    return FinishReason("abort", message=text, status_code=429, code="tenant_queue_full")
