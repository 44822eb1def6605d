"""Opens what a frontend needs besides the engine: tokenizer and tracer. Must not import jax."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.config import CONFIG_FILE, ModelConfig
from sgl_jax.models.served import served_config
from sgl_jax.text.tokenizer import Tokenizer
from sgl_jax.text.tokenizer_check import load_tokenizer

if TYPE_CHECKING:
    from sgl_jax.engine.front.request_spans import RequestTracer  # its libraries may be missing

_ENDPOINT = re.compile(r"(https?://)?[^\s/:]+:\d{1,5}|(https?://)?\[[0-9a-fA-F:]+\]:\d{1,5}")


def open_model_files(args: ServerArgs) -> Tokenizer:
    """Load the tokenizer of `args`, before anything large is loaded. Raises ValueError, with the
    file's name, if it is unusable."""
    if not Path(args.model_path).is_dir():
        raise ValueError(f"--model-path: there is no folder {args.model_path!r}")
    # The tokenizer's library also reads config.json, and would blame the tokenizer for a bad file.
    if (Path(args.model_path) / CONFIG_FILE).is_file():
        served_config(ModelConfig.from_path(args.model_path), args)
    return load_tokenizer(args)


def open_tracer(args: ServerArgs) -> "RequestTracer | None":
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
