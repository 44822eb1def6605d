"""A collector: OTLP's own gRPC service, which keeps the spans that it receives."""

import contextlib
from collections.abc import Iterator
from concurrent import futures
from itertools import pairwise
from typing import Any

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.waiting import until

PHASES = ["queue", "prefill", "decode", "detokenize"]


class Receiver(TraceServiceServicer):
    """`endpoint` is its address; `spans` are in the order in which they came."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}

    def Export(  # noqa: N802
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        for each in request.resource_spans:
            self.resource = values(each.resource)
            for scope in each.scope_spans:
                self.spans += scope.spans
        return ExportTraceServiceResponse()

    def named(self, name: str, **attributes: Any) -> list[Span]:
        """The spans of this name so far, with these attributes of `sgl_jax.`."""
        wanted = {f"sgl_jax.{key}": value for key, value in attributes.items()}.items()
        return [span for span in self.spans if span.name == name and wanted <= values(span).items()]

    def wait(self, request_id: str) -> Span:
        """The request of one HTTP request, once it has come."""
        until(lambda: self.named("request", request_id=request_id), f"the span of {request_id}")
        (span,) = self.named("request", request_id=request_id)
        return span

    def children(self, parent: Span) -> list[Span]:
        """By their begin."""
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))

    def assert_adds_up(self, request: Span, phases: list[str]) -> None:
        """The phases take exactly the time of the request, and chunks lie within them."""
        children = self.children(request)
        assert [child.name for child in children] == phases
        assert children[0].start_time_unix_nano == request.start_time_unix_nano
        assert children[-1].end_time_unix_nano == request.end_time_unix_nano
        for before, after in pairwise(children):
            assert before.end_time_unix_nano == after.start_time_unix_nano
        for child in children:
            assert child.trace_id == request.trace_id
            for inner in self.children(child):
                assert inner.name == "prefill_chunk"
                assert child.start_time_unix_nano <= inner.start_time_unix_nano
                assert inner.start_time_unix_nano <= inner.end_time_unix_nano
                assert inner.end_time_unix_nano <= child.end_time_unix_nano
            for event in child.events:
                assert child.start_time_unix_nano <= event.time_unix_nano
                assert event.time_unix_nano <= child.end_time_unix_nano


def values(span: Any) -> dict[str, Any]:
    """Attributes of a span or resource as Python values."""
    found: dict[str, Any] = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        if kind == "array_value":
            value = tuple(element.string_value for element in value.values)
        found[each.key] = value
    return found


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(receiver, server)
    receiver.endpoint = f"localhost:{server.add_insecure_port('localhost:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()
