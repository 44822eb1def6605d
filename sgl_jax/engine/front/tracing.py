"""Opens the tracer of `--enable-trace`. Its libraries are an optional extra."""

import re

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.front.request_stream import Tracer

_ENDPOINT = re.compile(r"(https?://)?[^\s/:]+:\d{1,5}|(https?://)?\[[0-9a-fA-F:]+\]:\d{1,5}")


def open_tracer(args: ServerArgs) -> Tracer | None:
    """Return the tracer of `args`, or None if tracing is off. Does not wait for the collector.

    Raises ValueError if OpenTelemetry is not installed, or the endpoint is not HOST:PORT.
    """
    if not args.enable_trace:
        return None
    if not _ENDPOINT.fullmatch(args.otlp_traces_endpoint):
        raise ValueError(
            f"--otlp-traces-endpoint must be HOST:PORT, got {args.otlp_traces_endpoint!r}"
        )
    try:
        # Imported here, because it may be missing.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        from sgl_jax.engine.front.request_spans import RequestTracer
    except ImportError as error:
        raise ValueError(
            f"--enable-trace needs OpenTelemetry ({error}): pip install 'sgl-jax[trace]'"
        ) from error
    endpoint = args.otlp_traces_endpoint
    exporter = OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
    return RequestTracer(args.model_name, exporter)
