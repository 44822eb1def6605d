"""What an engine computes on the machine: kernels, the time of steps, and one conversation."""

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from sgl_jax.core.page_tables import NO_PAGE_CHANGES, PageTables
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.doctor.kernel_errors import KernelErrors
from sgl_jax.doctor.planned_steps import PlannedSteps
from sgl_jax.doctor.report import Redaction, Section
from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import Generation
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.executor.layout import LaunchedStep
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.layers.kernels import Kernels
from sgl_jax.models.config import ModelConfig

AVOIDS_KERNELS = "--attention-backend xla"
_RANK_REQUESTS = 16
_INPUT_LEN = 1024
_CPU_INPUT_LEN = 128
_DECODE_STEPS = 4  # with all requests
# Kernels that a CPU simulates take seconds a step.
_SIMULATED_REQUESTS, _SIMULATED_INPUT_LEN, _SIMULATED_CHUNK = 2, 24, 32
_QUESTIONS = (
    "The code of Anna is 471. Please remember it.",
    "What is 17 + 25? Answer with the number.",
    "What is the code of Anna?",
)
_ANSWER_TOKENS = 16
_RETRACT_AFTER = 4  # tokens of each answer
# A greedy token may differ after a retract if the log-probabilities of both are this close: the KV
# of an answer's tokens is then computed by prefill instead of decode, and rounded in another order.
_TIE = 0.2
_TOP_TOKENS = 5
_REPEATS = 16


class DoctorLoad(NamedTuple):
    """Equal requests that run at once."""

    num_requests: int  # over all ranks
    input_len: int
    output_len: int


def choose_load(
    args: ServerArgs, model: ModelConfig, platform: str, input_len: int | None
) -> tuple[ServerArgs, DoctorLoad]:
    """Choose the load, and return it with the settings of an engine that serves it.

    Given settings are kept. Defaults of the others keep the engine small, which leaves memory for
    the comparison of kernels. Raises ValueError as `EngineConfig.resolve` does.
    """
    config = EngineConfig.resolve(args, model, platform)
    simulates = platform == "cpu" and config.args.attention_backend == "pallas"
    requests, length = _RANK_REQUESTS, _CPU_INPUT_LEN if platform == "cpu" else _INPUT_LEN
    chunk = args.chunked_prefill_size
    if simulates:
        requests, length = _SIMULATED_REQUESTS, _SIMULATED_INPUT_LEN
        chunk = chunk or _SIMULATED_CHUNK
    running = args.max_running_requests or requests * args.dp_size
    args = replace(args, max_running_requests=running, chunked_prefill_size=chunk, warmup="staged")
    buckets = EngineConfig.resolve(args, model, platform).buckets
    asked = input_len or length
    output_len = _DECODE_STEPS + -(-buckets.rows * asked // buckets.chunk_tokens)
    longest = (args.context_length or model.max_position_embeddings) - output_len
    load = DoctorLoad(running, max(1, min(asked, longest)), output_len)
    if args.max_total_tokens is None:
        page = config.args.page_size
        chat = len(_QUESTIONS) * (_ANSWER_TOKENS + 64)
        request = -(-max(load.input_len + output_len, chat) // page) * page
        args = replace(args, max_total_tokens=(buckets.rows + 1) * (request + page))
    return args, load


class _KeptPlan(NamedTuple):
    plan: StepPlan
    tables: PageTables


class ReplayExecutor(ModelExecutor):
    """An executor that keeps the fullest plans of decode rows and of prompts, to time them."""

    def __init__(self, args: ServerArgs) -> None:
        self.kept: dict[str, _KeptPlan] = {}
        super().__init__(args)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a plan, and keep it if it is the fullest of its kind."""
        launched = super().launch(plan)
        num_decode = sum(rank.num_decode for rank in plan.ranks)
        num_rows = sum(len(rank.rows) for rank in plan.ranks)
        kind = {num_rows: "decode", 0: "prefill"}.get(num_decode)
        if kind is not None and num_rows and not plan.is_masked:
            before = self.kept.get(kind)
            if before is None or _num_tokens(plan) >= _num_tokens(before.plan):
                self.kept[kind] = _KeptPlan(_fixed(plan), copy.deepcopy(self._page_tables))
        return launched

    def time_kept(self, kind: str) -> float:
        """Return the seconds of a step of `kind`, of several launched back to back. Overwrites KV;
        nothing may be in flight."""
        plan, self._page_tables = self.kept[kind]
        launch = super().launch
        self.result(launch(plan))
        begin = time.perf_counter()
        launched = [launch(plan) for _ in range(_REPEATS)]
        for step in launched:
            self.result(step)
        return (time.perf_counter() - begin) / _REPEATS

    def start_background(self) -> bool:
        """Compile no shape besides those of the first stage, which serve every step."""
        return False


def _num_tokens(plan: StepPlan) -> int:
    return sum(rank.num_tokens for rank in plan.ranks)


def _fixed(plan: StepPlan) -> StepPlan:
    """Return a plan that can be repeated: its lengths do not follow those on the device."""
    ranks = tuple(
        rank._replace(admissions=(), relayed=np.zeros_like(rank.relayed)) for rank in plan.ranks
    )
    return replace(plan, ranks=ranks, page_changes=NO_PAGE_CHANGES, saved=())


class ServedChecks:
    """The checks that need a model. One executor serves all, so the weights are loaded once."""

    def __init__(
        self,
        args: ServerArgs,
        model: ModelConfig,
        platform: str,
        load: DoctorLoad,
        planned: PlannedSteps | None,
        redact: Redaction,
    ) -> None:
        self._args, self._load, self._planned, self._redact = args, load, planned, redact
        self._kernels = EngineConfig.resolve(args, model, platform).build_options.kernels
        self._executor: ReplayExecutor | None = None
        self._has_other_kernels = False

    def check_kernels(self) -> Section:
        """Compare each kernel that the model uses with the XLA reference."""
        section, errors = Section("kernels"), KernelErrors()
        executor = self._open()
        try:
            with self._engine(errors.compared(self._kernels)) as engine:
                self._serve_load(engine)
        except Exception as error:  # of the compiler or the device
            section.failures.append(self._redact.of_error(error))
            names = [name for name, own in errors.by_kernel.items() if not own.is_reference]
            section.failures += [self._alone(executor, name) for name in names]
            section.failures = [text for text in section.failures if text]
        for name, own in sorted(errors.by_kernel.items()):
            section.facts[name] = vars(own) | {"failed": own.has_failed}
            if own.is_reference:
                found = "XLA, finite" if not own.num_not_finite else "XLA, not finite"
            else:
                found = f"largest error {own.error:.1e}, allowed {own.tolerance:.0e}"
            section.lines.append(f"{name:24}{found}, {own.num_compared:,} comparisons")
            if own.has_failed:
                section.failures.append(_verdict(name, own.is_reference, own.num_not_finite))
        return section

    def _alone(self, executor: ReplayExecutor, name: str) -> str:
        """Run steps with one kernel; return its failure, or nothing."""
        self._use(KernelErrors().compared(self._kernels, only=name))
        try:
            executor.reset()
            executor.warm_up()
        except Exception as error:
            return f"{name}: {self._redact.of_error(error)}; {AVOIDS_KERNELS} avoids it"
        return ""

    def time_steps(self) -> Section:
        """Time a decode step and a prefill step, next to the planner's estimates."""
        section, executor = Section("steps"), self._open()
        with self._engine(self._kernels) as engine:
            self._serve_load(engine)
        planned = self._planned.wait() if self._planned is not None else {}
        for kind in ("decode", "prefill"):
            seconds, plan = executor.time_kept(kind), executor.kept[kind].plan
            estimate = planned.get(kind)
            tokens = _num_tokens(plan)
            section.facts[kind] = {
                "seconds": seconds,
                "tokens": tokens,
                "input_len": self._load.input_len,
                "estimated_seconds": estimate,
            }
            beside = (
                f", planner {estimate * 1e3:.2f} ms ({seconds / estimate:.2f})" if estimate else ""
            )
            section.lines.append(
                f"{kind} step of {tokens:,} tokens, prompts of {self._load.input_len:,}: "
                f"{seconds * 1e3:.2f} ms{beside}"
            )
        if self._planned is not None and self._planned.problem:
            section.lines.append(f"planner: {self._redact(self._planned.problem)}")
        return section

    def converse(self) -> Section:
        """Serve a conversation twice, the second time with a retract in each answer, and compare
        its tokens."""
        section = Section("conversation")
        self._open()
        with self._engine(self._kernels) as engine:
            plain = _answers(engine, None)
            engine.flush_cache()
            retracted = _answers(engine, plain)
            counters = engine.server_info()["counters"]
        num_retracts = counters["requests_retracted"]
        num_tokens = sum(len(answer.output_ids) for answer in plain)
        num_equal = sum(map(_num_equal, plain, retracted))
        gaps = [
            gap for own in zip(plain, retracted, strict=True) if (gap := _gap(*own)) is not None
        ]
        section.facts = {
            "num_tokens": num_tokens,
            "num_equal": num_equal,
            "num_retracts": num_retracts,
            "logprob_gaps": gaps,
        }
        section.lines = [
            f"{len(plain)} answers, {num_retracts} retracts: {num_equal} of {num_tokens} tokens "
            "are equal"
        ]
        if num_retracts < len(plain):
            section.failures.append("a retract was asked for in each answer, and did not happen")
        if gaps:
            section.lines.append(f"largest gap of log-probabilities {max(gaps):.3f}")
        if any(gap > _TIE for gap in gaps):
            section.failures.append(
                f"tokens differ after a retract, and are no tie (gap {max(gaps):.2f}); compare "
                f"with {AVOIDS_KERNELS}"
            )
        return section

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def _open(self) -> ReplayExecutor:
        if self._executor is None:
            self._executor = ReplayExecutor(self._args)
        return self._executor

    def _use(self, kernels: Kernels) -> None:
        if kernels is not self._kernels or self._has_other_kernels:
            self._open().use_kernels(kernels)
        self._has_other_kernels = kernels is not self._kernels

    @contextmanager
    def _engine(self, kernels: Kernels) -> Iterator[Engine]:
        self._use(kernels)
        executor = self._open()
        executor.reset()
        with Engine.on(executor, self._args) as engine:
            yield engine

    def _serve_load(self, engine: Engine) -> None:
        """Serve prompts of random tokens, so that steps are as full as the load allows."""
        rng, load = np.random.default_rng(0), self._load
        shape = load.num_requests, load.input_len
        prompts = rng.integers(0, self._open().sizes.vocab_size, shape).tolist()
        engine.generate(input_ids=prompts, sampling_params=_greedy(load.output_len))


def _greedy(num_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}


def _verdict(name: str, is_reference: bool, num_not_finite: int) -> str:
    what = "computes numbers that are not finite" if num_not_finite else "differs from XLA"
    return f"{name} {what}" + ("" if is_reference else f"; {AVOIDS_KERNELS} avoids it")


def _answers(engine: Engine, expected: list[Generation] | None) -> list[Generation]:
    """Return the answers to the questions. With `expected` answers, those are the history, and each
    answer is retracted once."""
    history: list[int] = []
    answers: list[Generation] = []
    for number, question in enumerate(_QUESTIONS):
        history = history + _encoded(engine, question)
        is_pending, last = expected is not None, None
        options = {"return_logprob": True, "top_logprobs_num": _TOP_TOKENS}
        for last in engine.stream(history, _greedy(_ANSWER_TOKENS), **options):
            if is_pending and len(last.output_ids) >= _RETRACT_AFTER:
                is_pending = False
                engine.pause_generation("retract")
                engine.continue_generation()
        assert last is not None, "a stream ends with a finish reason"
        answers.append(last)
        history += (last if expected is None else expected[number]).output_ids
    return answers


def _encoded(engine: Engine, question: str) -> list[int]:
    tokenizer = engine.tokenizer
    if not tokenizer.can_encode:  # a folder without a tokenizer, for weights without a meaning
        return [1 + byte % (engine.info["vocab_size"] - 1) for byte in question.encode()]
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template([{"role": "user", "content": question}])
    return tokenizer.encode(question)


def _num_equal(a: Generation, b: Generation) -> int:
    """Return the number of leading tokens that are equal."""
    pairs = zip(a.output_ids, b.output_ids, strict=True)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(a.output_ids))


def _gap(a: Generation, b: Generation) -> float | None:
    """Return how much less probable the first different token of `b` was for `a`, as a difference
    of log-probabilities; None if all tokens are equal."""
    first = _num_equal(a, b)
    if first == len(a.output_ids):
        return None
    own = a.logprobs[first]
    likely = dict(zip(own.top_ids, own.top_logprobs, strict=True))
    return likely[own.token_id] - likely.get(b.output_ids[first], -math.inf)
