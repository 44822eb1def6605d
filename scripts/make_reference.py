"""Write docs/reference/flags.md and docs/reference/metrics.md.

    python scripts/make_reference.py

Flags come from `ServerArgs`. Metrics come from the registry of an engine that has just started.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from sgl_jax import Engine
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.settings import flag
from sgl_jax.metrics.engine_metrics import EngineMetrics
from sgl_jax.metrics.request_metrics import RequestMetrics

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"

_FLAGS = """# Flags

Made by `python scripts/make_reference.py` from `sgl_jax/core/server_args.py` and
`sgl_jax/core/scheduler_args.py`; a test compares.

`sgl-jax serve` takes these flags. `Engine(...)` takes the same names with underscores.
"""
_FLAGS_TABLE = """
## {title}

| flag | default | range | meaning |
|---|---|---|---|
{rows}"""
_METRICS = """# Metrics

Made by `python scripts/make_reference.py` from the registry of a running engine; a test compares.

`GET /metrics` returns these in Prometheus' text format. A counter's name ends with `_total`, a
histogram has `_bucket`, `_sum` and `_count`. Times are in seconds. All metrics have the label
`model_name`. Figures of the engine also have SGLang's labels of workers, each with one value: one
process drives all chips (`engine_type`, `tp_rank`, `pp_rank`, `moe_ep_rank`).

| metric | type | labels | meaning |
|---|---|---|---|
"""


def flags_page() -> str:
    """Return a page with every flag of the server, in the order of `ServerArgs`."""
    scheduling = {field.name for field in dataclasses.fields(SchedulerArgs)}
    tables: dict[str, str] = {"Model, devices and HTTP": "", "Scheduling": ""}
    for field in dataclasses.fields(ServerArgs):
        title = "Scheduling" if field.name in scheduling else "Model, devices and HTTP"
        tables[title] += _flag_row(field)
    return _FLAGS + "".join(_FLAGS_TABLE.format(title=t, rows=rows) for t, rows in tables.items())


def metrics_page() -> str:
    """Return a page with every metric of a server with the demonstration model, by name."""
    requests = RequestMetrics("demo")
    metrics = EngineMetrics(requests)
    with Engine(str(ROOT / "models" / "demo"), device="cpu", warmup="none") as engine:
        # Families without an entry would show no labels.
        metrics.update({**engine.server_info(), "waiting_for": {"pages": 0}})
    families = sorted(requests.registry.collect(), key=lambda family: family.name)
    return _METRICS + "".join(map(_metric_row, families))


def _flag_row(field: "dataclasses.Field[Any]") -> str:
    meaning = field.metadata["help"]
    if field.metadata["env"]:
        meaning += f" (environment: `{field.metadata['env']}`)"
    return f"| `{flag(field.name)}` | {_default(field.default)} | {_range(field)} | {meaning} |\n"


def _default(value: Any) -> str:
    if value == "":
        return "required"
    if value is None or value == ():
        return "-"
    return "off" if value is False else f"`{value}`"


def _range(field: "dataclasses.Field[Any]") -> str:
    if field.metadata["choices"]:
        return ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
    if field.metadata["bounds"]:
        low, high = field.metadata["bounds"]
        return f"{low:,} to {high:,}"
    return ""


_EVERYWHERE = {"le", "model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}


def _metric_row(family: Metric) -> str:
    suffix = "_total" if family.type == "counter" else ""
    labels = ", ".join(f"`{label}`" for label in _labels(family) if label not in _EVERYWHERE)
    return f"| `{family.name}{suffix}` | {family.type} | {labels} | {family.documentation} |\n"


def _labels(family: Metric) -> Iterable[str]:
    return family.samples[0].labels if family.samples else ()


if __name__ == "__main__":
    (REFERENCE / "flags.md").write_text(flags_page())
    (REFERENCE / "metrics.md").write_text(metrics_page())
