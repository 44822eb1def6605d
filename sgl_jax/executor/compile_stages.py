"""The order in which an engine's programs are compiled, and the shapes that steps may use so far.

With `--warmup staged` two programs are compiled before the server is ready: that of a full decode
batch, and the largest, which holds every step. A step is padded to the smallest shape that has a
program. The other programs follow in the background, those that save most first, then those of
masked steps and of several decode steps.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from sgl_jax.core.progress import Progress
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.executor.buckets import Bucket, Buckets
from sgl_jax.executor.compile_watch import BackgroundCompilation, CompileWatch
from sgl_jax.executor.programs import Programs

logger = logging.getLogger(__name__)


class CompileStages:
    """Compiles the programs of `buckets` as the resolved `--warmup` says."""

    def __init__(
        self,
        programs: Programs,
        buckets: Buckets,
        warmup: str,
        watch: CompileWatch,
        progress: Progress,
        *,
        has_decode_steps: bool,
        image_tokens: Sequence[int] = (),
    ) -> None:
        """Compile nothing yet. `image_tokens` are the shapes of the vision tower's programs."""
        self.warmup = warmup
        self._image_tokens = image_tokens
        self._programs = programs
        self.buckets = buckets
        self._watch, self._progress = watch, progress
        # The shapes with programs: of steps, and of masked steps.
        self._ready = self._ready_masked = buckets
        # The shapes of several decode steps: all, and those with programs.
        self._decode = self.ready_decode = buckets.decode if has_decode_steps else ()
        self._first: Future[None] | None = None
        self._background: BackgroundCompilation | None = None
        self._num_needed = 0  # of its jobs, before masked steps may be launched

    def begin(self) -> None:
        """Start compiling the programs of the first stage; `compile_first` waits for them."""
        if self.warmup != "none":
            thread = ThreadPoolExecutor(1, "compile-first")
            self._first = thread.submit(self._compile_first)
            thread.shutdown(wait=False)

    def give_up(self) -> None:
        """Start no further compilation, and wait for those of the first stage."""
        self.close()
        if self._first is not None:
            wait((self._first,))

    def compile_first(self) -> tuple[Bucket, ...]:
        """Compile the programs of the first stage, and return their shapes."""
        if self._first is None:
            self._compile_first()
        else:
            self._first.result()
        return self._ready.all

    def _compile_first(self) -> None:
        more: list[Callable[[], object]] = []
        if self.warmup == "staged":
            self._ready = self.buckets._replace(all=self.buckets.first)
            self._ready_masked = self.buckets._replace(all=())
        else:
            is_all = self.warmup == "all"
            halves = self._programs.halves if is_all else self._programs.trace_halves
            more = [partial(halves, bucket) for bucket in reversed(self.buckets.all)]
        if self.warmup == "all":
            more += [partial(self._programs.decode_steps, bucket) for bucket in self._decode]
        else:
            self.ready_decode = ()
        more += [partial(self._programs.encode, most) for most in self._image_tokens]
        self._programs.compile_all(self._ready.all, self._progress, more)

    def start_background(self) -> bool:
        """Start compiling the other programs; return False if there are none."""
        if self.warmup not in ("plain", "staged"):
            return False
        # The hosts of a group have to use the same programs, so they wait for all.
        is_staged = self.warmup == "staged"
        needed = self.buckets.first if is_staged else self.buckets.all
        rest = self.buckets.by_saving() if is_staged else []
        jobs = [partial(self._try, self._add_step, bucket) for bucket in rest]
        jobs += [partial(self._add_masked, bucket) for bucket in needed]
        self._num_needed = len(jobs)
        jobs += [partial(self._try, self._add_decode, bucket) for bucket in self._decode]
        jobs += [partial(self._try, self._add_masked, bucket) for bucket in rest]
        self._background = BackgroundCompilation(jobs, self._watch, self._progress)
        return True

    @property
    def is_done(self) -> bool:
        """Return whether background compilation has ended."""
        return self._background is None or self._background.is_done

    def background_end(self) -> str | None:
        """Return "" if masked steps may be launched, the error if their programs failed to compile,
        and None before."""
        background = self._background
        if background is None:
            return None
        if background.is_done or background.num_done >= self._num_needed:
            return background.error or ""
        return None

    def bucket_of(self, plan: StepPlan) -> Bucket:
        """Return the smallest shape that holds `plan`, of those with programs."""
        ready = self._ready_masked if plan.is_masked else self._ready
        if plan.has_steps:
            ready = ready._replace(all=self.ready_decode)
        tokens = max(int(rank.q_lens.sum()) for rank in plan.ranks)
        return ready.smallest(tokens, max(len(rank.rows) for rank in plan.ranks))

    @property
    def has_decode_steps(self) -> bool:
        """Return whether plans may have several decode steps: their programs are compiled, for all
        shapes, since padding would cost more than the launches that it saves."""
        return self.ready_decode == self._decode

    def close(self) -> None:
        """Start no further compilation."""
        self._programs.close()
        if self._background is not None:
            self._background.close()

    def _try(self, add: Callable[[Bucket], None], bucket: Bucket) -> None:
        """Add a shape that no step needs: the first shapes hold every step."""
        try:
            add(bucket)
        except Exception:  # of the compiler, or out of memory
            logger.exception("a program of %s failed to compile; larger ones are used", bucket)

    def _add_step(self, bucket: Bucket) -> None:
        """Compile a shape's step, and let steps use it from now on."""
        self._programs.step(bucket)
        self._ready = self._with(self._ready, bucket)

    def _add_masked(self, bucket: Bucket) -> None:
        self._programs.halves(bucket)
        self._ready_masked = self._with(self._ready_masked, bucket)

    def _add_decode(self, bucket: Bucket) -> None:
        self._programs.decode_steps(bucket)
        self.ready_decode = (*self.ready_decode, bucket)

    def _with(self, ready: Buckets, bucket: Bucket) -> Buckets:
        own = tuple(each for each in self.buckets.all if each == bucket or each in ready.all)
        return ready._replace(all=own)
