"""Spans of requests for OpenTelemetry, created at each request's end from the stamps of its stream.

    request                  from its arrival until the consumer has taken its last text
      queue                  until the engine starts it
      prefill                until its first token; has a `prefill_chunk` for each launch
      decode                 until its last token; after a retract, chunks again
      detokenize             until its last text is made and taken

The phases of a request follow each other without a gap. A phase that the request did not reach is
missing.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from itertools import pairwise
from os import environ
from typing import Any

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from sgl_jax.core.log_lines import request_id
from sgl_jax.engine.front.request_stream import RequestStream

_NAME = "sgl_jax"
_MAX_QUEUED_SPANS = 16_384
_CLOSE_S = 5.0
_LOG_INTERVAL_S = 60.0
# These loggers write a line for each attempt to reach the collector and for each dropped span.
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
)


class RequestTracer:
    """Passes the spans of requests to `exporter`, in batches, on a separate thread.

    A failed batch is dropped. Spans wait for a slow exporter; beyond `_MAX_QUEUED_SPANS` the oldest
    are dropped. Sampling follows the parent, and the SDK's environment variables.
    """

    def __init__(self, model_name: str, exporter: SpanExporter) -> None:
        self._model_name = model_name
        self._exporter = exporter
        version = metadata.version("sgl-jax")
        service = environ.get("OTEL_SERVICE_NAME", _NAME)
        resource = Resource.create({"service.name": service, "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        processor = BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED_SPANS)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(_NAME, version)
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_OneLineAMinute())

    @contextmanager
    def continued(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Continue the trace of the W3C `traceparent` in `headers` for requests begun inside."""
        token = contexts.attach(TraceContextTextMapPropagator().extract(headers))
        try:
            yield
        finally:
            contexts.detach(token)

    def begin(self) -> Callable[[RequestStream], None]:
        """Return a function to call when the stream ends. Call this where a request arrives."""
        return partial(self._end, contexts.get_current(), request_id.get())

    def close(self) -> None:
        """Send the queued spans within `_CLOSE_S`, and drop the rest."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()

    def _end(self, parent: Context, http_id: str, stream: RequestStream) -> None:
        now, now_ns = time.perf_counter(), time.time_ns()

        def clock_ns(stamp: float) -> int:
            """Convert a stamp of `time.perf_counter` to nanoseconds since 1970."""
            return now_ns - round((now - stamp) * 1e9)

        def start(name: str, parent: Context, begin: float, **options: Any) -> Span:
            return self._tracer.start_span(name, parent, start_time=clock_ns(begin), **options)

        attributes = _attributes(stream, self._model_name, http_id, now)
        kind = SpanKind.SERVER
        whole = start("request", parent, stream.created_at, kind=kind, attributes=attributes)
        if whole.is_recording():
            _set_status(whole, stream)
            for (name, begin), (_, end) in pairwise([*_phases(stream), ("", now)]):
                phase = start(name, set_span_in_context(whole), begin)
                for mark in stream.marks:
                    if not begin <= mark.begin_s < end:
                        continue
                    if not mark.num_tokens:
                        phase.add_event("retracted", timestamp=clock_ns(mark.begin_s))
                        continue
                    size = {"sgl_jax.num_tokens": mark.num_tokens}
                    within = set_span_in_context(phase)
                    chunk = start("prefill_chunk", within, mark.begin_s, attributes=size)
                    # The next phase may begin sooner, because its stamp is taken in the frontend.
                    chunk.end(clock_ns(min(mark.end_s, end)))
                phase.end(clock_ns(end))
        whole.end(now_ns)


class _OneLineAMinute(logging.Filter):
    """Limits the log lines about an unreachable collector to one per minute."""

    _next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        is_due = time.monotonic() >= self._next_at
        if is_due:
            self._next_at = time.monotonic() + _LOG_INTERVAL_S
        return is_due


def _phases(stream: RequestStream) -> list[tuple[str, float]]:
    is_whole = stream.finish is not None and stream.finish.type != "abort"
    begins = {
        "queue": stream.created_at,
        "prefill": stream.started_at,
        "decode": stream.first_token_at,
        "detokenize": stream.finished_at if is_whole else None,
    }
    return [(name, begin) for name, begin in begins.items() if begin is not None]


def _attributes(
    stream: RequestStream, model_name: str, http_id: str, now: float
) -> dict[str, AttributeValue]:
    """Return span attributes by OpenTelemetry's GenAI conventions or `sgl_jax.`; times in s."""
    request, sampling = stream.request, stream.request.sampling
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": _NAME,
        "gen_ai.request.model": model_name,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.stream": stream.streaming,
        "gen_ai.conversation.id": None if request.session is None else request.session.id,
        "gen_ai.usage.input_tokens": stream.num_prompt_tokens,
        "gen_ai.usage.output_tokens": stream.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": stream.cached_tokens,
        "gen_ai.response.finish_reasons": [_finish_reason(stream)],
        "gen_ai.latency.e2e": now - stream.created_at,
        "sgl_jax.rid": stream.client_rid,
        "sgl_jax.request_id": http_id or None,
        "sgl_jax.dp_rank": stream.dp_rank,
        "sgl_jax.num_retractions": sum(not mark.num_tokens for mark in stream.marks),
    }
    if stream.first_token_at is not None:
        found["gen_ai.latency.time_to_first_token"] = stream.first_token_at - stream.created_at
    return {name: value for name, value in found.items() if value is not None}


def _finish_reason(stream: RequestStream) -> str:
    if stream.finish is not None:
        return stream.finish.type
    return "abort" if stream.error is None else "error"


def _set_status(span: Span, stream: RequestStream) -> None:
    """Set an error status if the server is at fault, not if the client aborts or goes away."""
    finish, error = stream.finish, stream.error
    if finish is None and error is not None:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, str(error)))
    elif finish is not None and (finish.status_code or 0) >= 500:
        span.set_attribute("error.type", finish.code or str(finish.status_code))
        span.set_status(Status(StatusCode.ERROR, finish.message))
