"""Compiles grammars on one thread, in turns between tenants.

The engine loop uses the queue and never waits for the thread: they share no lock, and pass jobs
through queues with atomic operations. The queue keeps the only record of compiled grammars.
"""

import logging
import queue
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from llguidance import LLMatcher

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import Grammar

logger = logging.getLogger(__name__)

_MAX_KEPT = 256  # compiled grammars
# Characters of these. A schema of 23,000 takes 7 MB when compiled, about 300 bytes a character.
_MAX_KEPT_CHARS = 1 << 19
_FAILED = "the engine failed on this grammar; see its log"
# llguidance recurses from rule to rule, and a stack overflow ends the process. The longest chain of
# rules allowed in a grammar takes less than 32 MiB. Unused pages take no memory.
_STACK_BYTES = 256 << 20
_MAIN_THREAD_POLL_S = 0.5  # an idle thread must not keep the process alive


@dataclass(eq=False)
class Job:
    """The compilation of one grammar. It ends with a `matcher`, with an `error`, or with neither if
    it was dropped because all of its requests had ended."""

    grammar: Grammar
    requests: list[tuple[str, str]] = field(default_factory=list)  # rid and tenant of each
    tenants: list[str] = field(default_factory=list)  # with this job in their turns
    matcher: LLMatcher | None = None
    error: InvalidRequestError | RuntimeError | None = None
    has_ended: bool = False


class CompileQueue:
    """A queue of grammars to compile, for use by one thread.

    Tenants are the holders of shares (`core.shares`): "" stands for all clients without a share.

    Attributes:
        ended: ended jobs, to be removed by `take`.
        num_compiled: grammars compiled since the start.
    """

    def __init__(
        self,
        compile_grammar: Callable[[Grammar], LLMatcher],
        is_wanted: Callable[[str], object],
        max_queued: int,
        *,
        has_shares: bool = False,
    ) -> None:
        """Start the thread.

        Args:
            compile_grammar: raises `InvalidRequestError` for a grammar that cannot be served.
            is_wanted: returns whether request `rid` still waits; called on the thread.
            max_queued: maximum number of jobs. A tenant may queue no more jobs than places left, so
                that no tenant can take all of them.
            has_shares: this rule also applies to "", because other clients have shares.
        """
        self._compile = compile_grammar
        self._is_wanted = is_wanted
        self._max_queued = max_queued
        self._has_shares = has_shares
        self._jobs: dict[Grammar, Job] = {}
        self._num_queued: Counter[str] = Counter()  # jobs by tenant
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._num_kept_chars = 0
        self._inbox: queue.SimpleQueue[tuple[str, Job] | None] = queue.SimpleQueue()
        self._is_closed = False
        self.ended: deque[Job] = deque()
        self.num_compiled = 0
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="grammars").start()
        finally:
            threading.stack_size(usual_bytes)

    def __len__(self) -> int:
        """Return the number of jobs not yet taken."""
        return len(self._jobs)

    def find(self, grammar: Grammar) -> LLMatcher | None:
        """Return the cached compiled grammar, or None."""
        matcher = self._kept.get(grammar)
        if matcher is not None:
            self._kept.move_to_end(grammar)
        return matcher

    def add(self, grammar: Grammar, rid: str, tenant: str) -> bool:
        """Compile a grammar for request `rid`. Return False if the tenant has too many jobs."""
        job = self._jobs.get(grammar)
        if job is None or tenant not in job.tenants:
            most = self._max_queued
            if tenant or self._has_shares:
                most -= sum(self._num_queued.values())
            if self._num_queued[tenant] >= most:
                return False
        self._add(grammar, rid, tenant)
        return True

    def take(self) -> list[Job]:
        """Return the ended jobs. A dropped job with new requests is queued again."""
        taken = []
        while self.ended:
            job = self.ended.popleft()
            del self._jobs[job.grammar]
            self._num_queued -= Counter(job.tenants)  # drops counts of 0
            if job.matcher is not None:
                self.num_compiled += 1
                self._keep(job.grammar, job.matcher)
            if job.matcher is not None or job.error is not None:
                taken.append(job)
                continue
            for rid, tenant in job.requests:
                if self._is_wanted(rid):
                    self._add(job.grammar, rid, tenant)
        return taken

    def close(self) -> None:
        """End the thread after the grammar being compiled, and drop that grammar."""
        self._is_closed = True
        self._inbox.put(None)

    def _add(self, grammar: Grammar, rid: str, tenant: str) -> None:
        job = self._jobs.setdefault(grammar, Job(grammar))
        job.requests.append((rid, tenant))
        if tenant not in job.tenants:
            job.tenants.append(tenant)
            self._num_queued[tenant] += 1
            self._inbox.put((tenant, job))

    def _keep(self, grammar: Grammar, matcher: LLMatcher) -> None:
        if grammar not in self._kept:
            self._num_kept_chars += len(grammar.text)
        self._kept[grammar] = matcher
        while len(self._kept) > _MAX_KEPT or (
            self._num_kept_chars > _MAX_KEPT_CHARS and len(self._kept) > 1
        ):
            oldest, _ = self._kept.popitem(last=False)
            self._num_kept_chars -= len(oldest.text)

    # -- the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        turns: OrderedDict[str, deque[Job]] = OrderedDict()  # jobs by tenant, in order of turns
        while self._receive(turns):
            tenant = next(iter(turns))
            job = turns[tenant].popleft()
            if not job.has_ended:  # it ended in the turn of another tenant
                self._run(job)
            # A tenant that arrived in the meantime goes first.
            self._receive_all(turns)
            if turns[tenant]:
                turns.move_to_end(tenant)
            else:
                del turns[tenant]

    def _receive(self, turns: OrderedDict[str, deque[Job]]) -> bool:
        """Wait until there is a job. Return False if the queue or the process ends."""
        while not self._is_closed and threading.main_thread().is_alive():
            self._receive_all(turns)
            if turns:
                return True
            try:
                item = self._inbox.get(timeout=_MAIN_THREAD_POLL_S)
            except queue.Empty:
                continue
            if item is not None:
                turns[item[0]] = deque([item[1]])
        return False

    def _receive_all(self, turns: OrderedDict[str, deque[Job]]) -> None:
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is not None:
                turns.setdefault(item[0], deque()).append(item[1])

    def _run(self, job: Job) -> None:
        """Compile the grammar of `job`, unless no client waits for it any longer."""
        if any(self._is_wanted(rid) for rid, _ in job.requests):
            try:
                job.matcher = self._compile(job.grammar)
            except InvalidRequestError as error:
                job.error = error
            except BaseException:  # a panic in llguidance is not an `Exception`
                logger.exception("a grammar could not be compiled")
                job.error = RuntimeError(_FAILED)
        job.has_ended = True
        self.ended.append(job)
