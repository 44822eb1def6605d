"""Drives a scheduler with an executor as the engine loop does, and checks everything it can."""

from collections import defaultdict, deque

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import AbortRequest, FinishReason, GenerateRequest, TokenLogprobs
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import Executor, StepHandle, StepPlan
from sgl_jax.scheduler.config import SchedulerConfig
from sgl_jax.scheduler.fake_executor import OracleExecutor
from sgl_jax.scheduler.scheduler import Scheduler


def make_sizes(
    *,
    dp_size: int = 1,
    page_size: int = 4,
    num_pages: int = 32,
    num_rows: int = 9,
    max_context_len: int = 256,
    max_step_tokens: int = 16,
    vocab_size: int = 50,
    max_prompt_logprob_tokens: int | None = None,
    max_draft_tokens: int = 0,
) -> EngineSizes:
    """Small sizes, as tests like them."""
    return EngineSizes(
        dp_size=dp_size,
        page_size=page_size,
        num_pages=num_pages,
        num_rows=num_rows,
        max_context_len=max_context_len,
        max_step_tokens=max_step_tokens,
        max_prompt_logprob_tokens=max_prompt_logprob_tokens or max_step_tokens,
        vocab_size=vocab_size,
        max_draft_tokens=max_draft_tokens,
    )


def generate(rid: str, prompt: list[int], max_new_tokens: int, **kwargs: object) -> GenerateRequest:
    """A greedy request; keyword arguments go to `GenerateRequest`, or to its sampling."""
    fields = GenerateRequest.__struct_fields__
    sampling = {key: value for key, value in kwargs.items() if key not in fields}
    rest = {key: value for key, value in kwargs.items() if key in fields}
    return GenerateRequest(
        rid=rid,
        input_ids=prompt,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **sampling),
        **rest,
    )


class Driver:
    """One engine loop. With `overlap`, a step is planned before the last one is committed."""

    def __init__(
        self,
        sizes: EngineSizes,
        config: SchedulerConfig | None = None,
        *,
        overlap: bool = True,
        executor: Executor | None = None,
    ) -> None:
        config = config or SchedulerConfig(chunked_prefill_size=8)
        self.scheduler = Scheduler(sizes, config)
        self.oracle = OracleExecutor(sizes)
        self.executor: Executor = executor or self.oracle
        self.overlap = overlap
        self.in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finish: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.dp_rank: dict[str, int] = {}
        self.prompts: dict[str, list[int]] = {}
        self.logprob_start: dict[str, int] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.plans: list[StepPlan] = []

    def submit(self, message: GenerateRequest) -> None:
        self.prompts[message.rid] = message.input_ids
        self.logprob_start[message.rid] = message.logprob_start_len
        self.scheduler.submit(message)
        self.collect()

    def abort(self, rid: str) -> None:
        self.scheduler.abort(AbortRequest(rid=rid))
        self.collect()

    def step(self) -> bool:
        """One turn of the loop; False if there was nothing to do."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.executor.launch(plan)))
        if self.in_flight and (plan is None or not self.overlap or len(self.in_flight) > 1):
            done, handle = self.in_flight.popleft()
            self.scheduler.commit(done, self.executor.result(handle))
        self.scheduler.check_balance()
        self.collect()
        return plan is not None or bool(self.in_flight)

    def run(self, max_steps: int = 5000) -> None:
        """Step until idle, then prove the books."""
        for _ in range(max_steps):
            self.step()
            if self.scheduler.is_idle and not self.in_flight:
                self.check_idle()
                return
        raise AssertionError(f"not idle after {max_steps} steps")

    def collect(self) -> None:
        batch = self.scheduler.take_outputs()
        if batch is None:
            return
        for rid, token in zip(batch.rids, batch.tokens, strict=True):
            assert rid not in self.finish, f"{rid} got a token after its end"
            self.tokens[rid].append(token)
        for output in batch.outputs:
            assert output.rid not in self.finish, f"{output.rid} got an output after its end"
            self.tokens[output.rid].extend(output.token_ids)
            self.prompt_logprobs[output.rid].extend(output.prompt_logprobs or [])
            self.cached[output.rid] = output.cached_tokens
            self.dp_rank[output.rid] = output.dp_rank
            if output.finish is not None:
                self.finish[output.rid] = output.finish

    def check_idle(self) -> None:
        self.scheduler.audit()
        for view in self.scheduler.memory_views():
            assert view.leased_pages == 0
            assert view.protected_pages == 0
            assert view.free_rows == view.total_rows

    def check_tokens(self, rid: str) -> None:
        """Every token of a request must be what its prefix alone determines."""
        got = self.tokens[rid]
        assert got == self.oracle.expected_output(self.prompts[rid], len(got)), rid

    def check_prompt_logprobs(self, rid: str, prompt: list[int]) -> None:
        """Each prompt position asked for was reported once, in order, with its own value."""
        got = self.prompt_logprobs[rid]
        start = self.logprob_start[rid]
        if start < 0:
            assert got == []
            return
        expected: list[float | None] = [*self.oracle.expected_logprobs(prompt)]
        expected[0] = None
        assert [entry.logprob for entry in got] == expected[start:], rid
        assert [entry.token_id for entry in got] == prompt[start:], rid
