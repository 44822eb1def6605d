"""Spans of requests: their times, their parents, and what they say of an end."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sgl_jax import Engine
from sgl_jax.core.engine_messages import FinishReason, Mark, OutputBatch, RequestOutput
from sgl_jax.core.log_lines import request_id
from sgl_jax.core.messages import SessionTurn
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.front.frontend import Frontend
from sgl_jax.engine.front.request_spans import RequestTracer
from sgl_jax.engine.front.request_stream import RequestStream
from sgl_jax.engine.opening import open_tracer
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import DirectClient, ScriptedEngine
from tests.support.otlp_receiver import PHASES, receiving, values
from tests.support.tokenizers import byte_level, load

DEMO = Path(__file__).parents[3] / "models" / "demo"
TRACE_ID, SPAN_ID = 0xAF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
LENGTH = FinishReason("length")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level(), tmp_path_factory.mktemp("tokenizer"))


class Rig:
    """A front with a tracer, and the messages that its engine would send."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = RequestTracer("tiny", self._exporter)
        args = ServerArgs(model_path="no tokenizer")
        client = DirectClient(ScriptedEngine())
        self.front = Frontend(args, tokenizer, client.engine.info, client.send, self.tracer)

    def start(self, **options: Any) -> RequestStream:
        sampling = SamplingParams(max_new_tokens=9, stop=options.pop("stop", ()))
        request = self.front.checks.prepare([40, 41, 42], sampling, **options)
        return self.front.submit(request, lambda: None)

    def output(
        self,
        stream: RequestStream,
        tokens: Sequence[int] = (),
        finish: FinishReason | None = None,
        marks: Sequence[Mark] = (),
        started_at: float | None = None,
    ) -> None:
        rid = stream.request.rid
        self.front.handle(
            OutputBatch(
                outputs=[RequestOutput(rid, list(tokens), 2, 1, finish)],
                starts={} if started_at is None else {rid: started_at},
                marks={rid: list(marks)} if marks else {},
            )
        )

    def spans(self) -> list[ReadableSpan]:
        """All spans; the tracer ends."""
        self.tracer.close()
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def rig(tokenizer: Tokenizer) -> Iterator[Rig]:
    rig = Rig(tokenizer)
    yield rig
    rig.tracer.close()


def family(spans: list[ReadableSpan]) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The one request, and its phases by their begin; they must take exactly its time."""
    (whole,) = [span for span in spans if span.name == "request"]
    phases = [span for span in spans if is_child(span, whole)]
    phases.sort(key=lambda span: (span.start_time or 0, span.end_time or 0))
    borders = [whole.start_time, *(span.end_time for span in phases)]
    assert [span.start_time for span in phases] == borders[:-1]
    assert borders[-1] == whole.end_time
    durations = [(span.end_time or 0) - (span.start_time or 0) for span in phases]
    assert all(duration >= 0 for duration in durations)
    assert sum(durations) == (whole.end_time or 0) - (whole.start_time or 0)
    return whole, phases


def num_tokens(chunk: ReadableSpan) -> Any:
    return dict(chunk.attributes or {})["sgl_jax.num_tokens"]


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    assert parent.context is not None
    return span.parent is not None and span.parent.span_id == parent.context.span_id


def test_phases_take_exactly_the_time_of_the_request_and_chunks_lie_within(rig: Rig) -> None:
    token = request_id.set("http-1")
    stream = rig.start(rid="mine", session=SessionTurn(id="s"))
    request_id.reset(token)
    at = stream.created_at
    chunks = [Mark(at, at, 16), Mark(at, at, 5)]
    rig.output(stream, [65], marks=chunks, started_at=at)
    again_at = stream.first_token_at
    assert again_at is not None
    rig.output(stream, [66], marks=[Mark(again_at, again_at, 0), Mark(again_at, again_at, 20)])
    rig.output(stream, [67], LENGTH)
    assert stream.take() is not None
    rig.front.abandon(stream)  # as every HTTP answer does at its end

    spans = rig.spans()
    whole, (queue, prefill, decode, detokenize) = family(spans)
    assert [queue.name, prefill.name, decode.name, detokenize.name] == PHASES
    assert [num_tokens(span) for span in spans if is_child(span, prefill)] == [16, 5]
    assert [num_tokens(span) for span in spans if is_child(span, decode)] == [20]
    assert [event.name for event in decode.events] == ["retracted"]
    told = dict(whole.attributes or {})
    assert told["gen_ai.latency.time_to_first_token"] == stream.first_token_at - at
    assert told["gen_ai.usage.input_tokens"] == told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.usage.cache_read.input_tokens"] == 2
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["gen_ai.request.model"] == "tiny"
    assert told["gen_ai.conversation.id"] == "s"
    names = ("rid", "request_id", "dp_rank", "num_retractions")
    assert [told[f"sgl_jax.{name}"] for name in names] == ["mine", "http-1", 1, 1]
    assert whole.kind is trace.SpanKind.SERVER
    assert whole.status.status_code is trace.StatusCode.UNSET


def test_chunks_lie_within_a_phase_though_the_first_token_arrives_late(rig: Rig) -> None:
    stream = rig.start()
    rig.output(stream, [65], started_at=stream.created_at)
    assert stream.first_token_at is not None
    # The engine retracted it and began anew, while the first token was on its way to the frontend.
    again = Mark(stream.first_token_at - 1e-6, time.perf_counter() + 1e-3, 20)
    time.sleep(2e-3)
    rig.output(stream, [66], LENGTH, marks=[again])
    stream.take()
    spans = rig.spans()
    _, phases = family(spans)
    (chunk,) = (span for span in spans if span.name == "prefill_chunk")
    (phase,) = (phase for phase in phases if is_child(chunk, phase))
    assert (phase.start_time or 0) <= (chunk.start_time or 0)
    assert (chunk.end_time or 0) <= (phase.end_time or 0)


def abandoned(rig: Rig, stream: RequestStream) -> None:
    rig.front.abandon(stream)


def aborted(rig: Rig, stream: RequestStream) -> None:
    rig.output(stream, finish=FinishReason("abort", message="asked"))
    stream.take()


def timed_out(rig: Rig, stream: RequestStream) -> None:
    rig.output(stream, finish=FinishReason("abort", message="too long", status_code=504))
    stream.take()


def died(rig: Rig, stream: RequestStream) -> None:
    rig.front.fail("the engine ended")
    rig.front.abandon(stream)


@pytest.mark.parametrize(
    ("end", "reason", "error"),
    [
        (abandoned, "abort", None),
        (aborted, "abort", None),
        (timed_out, "abort", "504"),
        (died, "error", "EngineDeadError"),
    ],
)
@pytest.mark.parametrize("num_phases", [1, 2, 3])
def test_a_request_that_ends_early_has_the_phases_that_it_reached(
    rig: Rig,
    end: Callable[[Rig, RequestStream], None],
    reason: str,
    error: str | None,
    num_phases: int,
) -> None:
    stream = rig.start()
    if num_phases > 1:
        rig.output(stream, [65] * (num_phases - 2), started_at=stream.created_at)
    end(rig, stream)
    whole, phases = family(rig.spans())
    assert [span.name for span in phases] == PHASES[:num_phases]
    told = dict(whole.attributes or {})
    assert told["gen_ai.response.finish_reasons"] == (reason,)
    assert told.get("error.type") == error
    assert whole.status.is_ok == (error is None)


def test_a_stop_string_ends_the_request_here(rig: Rig) -> None:
    stream = rig.start(stop=("B",))
    rig.output(stream, rig.front.tokenizer.encode("A"), started_at=stream.created_at)
    rig.output(stream, rig.front.tokenizer.encode("BC"))
    stream.take()
    whole, phases = family(rig.spans())
    assert [span.name for span in phases] == PHASES
    assert dict(whole.attributes or {})["gen_ai.response.finish_reasons"] == ("stop",)


@pytest.mark.parametrize(("flags", "is_traced"), [("01", True), ("00", False)])
def test_the_trace_of_the_client_goes_on_if_it_is_sampled(
    rig: Rig, flags: str, is_traced: bool
) -> None:
    with rig.tracer.continued({"traceparent": f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-{flags}"}):
        stream = rig.start()
    rig.output(stream, [65], LENGTH)
    stream.take()
    spans = rig.spans()
    assert bool(spans) == is_traced
    for span in spans:
        assert span.context is not None
        assert span.context.trace_id == TRACE_ID
    if is_traced:
        parent = family(spans)[0].parent
        assert parent is not None
        assert parent.span_id == SPAN_ID


def test_headers_of_another_form_begin_a_new_trace(rig: Rig) -> None:
    for value in ("", "00-0-0-01", f"00-{0:032x}-{SPAN_ID:016x}-01"):
        with rig.tracer.continued({"traceparent": value}):
            rig.front.abandon(rig.start())
    assert {span.parent for span in rig.spans() if span.name == "request"} == {None}


@pytest.mark.parametrize("endpoint", ["", "localhost", "localhost:port", "ftp://a:1", "a b:1"])
def test_an_endpoint_must_be_an_address(endpoint: str) -> None:
    args = ServerArgs(enable_trace=True, otlp_traces_endpoint=endpoint)
    with pytest.raises(ValueError, match="--otlp-traces-endpoint must be HOST:PORT"):
        open_tracer(args)


def test_without_the_libraries_the_extra_is_named_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sgl_jax.engine.front.request_spans", None)
    with pytest.raises(ValueError, match=r"--enable-trace needs .*'sgl-jax\[trace\]'"):
        Engine("no such folder", enable_trace=True)
    assert open_tracer(ServerArgs()) is None


@pytest.mark.long
def test_an_offline_engine_sends_its_chunks_and_retracts_within_the_callers_span() -> None:
    with receiving() as receiver:
        settings: dict[str, Any] = {"device": "cpu", "warmup": "none", "chunked_prefill_size": 16}
        settings |= {"max_total_tokens": 1024, "page_size": 16, "test_retract": True}
        settings |= {"enable_trace": True, "otlp_traces_endpoint": receiver.endpoint}
        settings |= {"max_running_requests": 4, "context_length": 128}
        with Engine(str(DEMO), **settings) as engine:
            prompts = [list(range(40 + i, 90 + i)) for i in range(4)]
            sampling = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
            with TracerProvider().get_tracer("caller").start_as_current_span("caller") as caller:
                engine.generate(prompts, sampling)
        requests = receiver.named("request")
        assert len(requests) == len(prompts)
        num_retracted = 0
        for request in requests:
            receiver.assert_adds_up(request, PHASES)
            parent = caller.get_span_context()
            assert int.from_bytes(request.parent_span_id) == parent.span_id
            children = receiver.children(request)
            events = [event.name for child in children for event in child.events]
            assert events == ["retracted"] * values(request)["sgl_jax.num_retractions"]
            num_retracted += len(events)
            _, prefill, *_ = children
            chunks = receiver.children(prefill)
            if not prefill.events:  # then exactly the prompt was computed
                computed = sum(values(chunk)["sgl_jax.num_tokens"] for chunk in chunks)
                told = values(request)
                cached = told["gen_ai.usage.cache_read.input_tokens"]
                assert computed == told["gen_ai.usage.input_tokens"] - cached
        assert num_retracted
        assert receiver.resource["service.name"] == "sgl_jax"
