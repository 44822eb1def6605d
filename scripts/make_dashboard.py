"""Write deploy/grafana/sgl_jax.json, the Grafana dashboard of the engine's metrics.

    python scripts/make_dashboard.py

A test compares the file with this script's result, and its metrics with the exported metrics.
"""

import json
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "sgl_jax.json"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_MODEL = 'model_name=~"$model_name"'
_RANK = f'{_MODEL},dp_rank=~"$dp_rank"'
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


class Panel(NamedTuple):
    """A graph: its title, unit, and expressions by legend."""

    title: str
    unit: str
    lines: dict[str, str]
    is_stacked: bool = False


def _rate(name: str, by: str = "", labels: str = _MODEL) -> str:
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate(sglang:{name}{{{labels}}}[$__rate_interval]))"


def _sum(name: str, by: str, labels: str = _RANK) -> str:
    return f"sum by ({by}) (sglang:{name}{{{labels}}})"


def _quantiles(name: str) -> dict[str, str]:
    buckets = _rate(f"{name}_bucket", "le")
    return {
        f"p{share}": f"histogram_quantile({share / 100:g}, {buckets})" for share in (50, 90, 99)
    }


ROWS = {
    "Requests": [
        Panel(
            "Requests",
            "short",
            {
                "running, rank {{dp_rank}}": _sum("num_running_reqs", "dp_rank"),
                "waiting, rank {{dp_rank}}": _sum("num_queue_reqs", "dp_rank"),
            },
        ),
        Panel(
            "Waiting, by reason",
            "short",
            {"{{reason}}": _sum("waiting_for", "reason", _MODEL)},
            is_stacked=True,
        ),
        Panel(
            "Requests per second",
            "reqps",
            {
                "accepted": _rate("num_requests_total"),
                "ended early": _rate("num_aborted_requests_total"),
                "timed out": _rate("num_timed_out_requests_total"),
            },
        ),
        Panel("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
        Panel("Time per output token", "s", _quantiles("inter_token_latency_seconds")),
        Panel("Time from arrival to last token", "s", _quantiles("e2e_request_latency_seconds")),
        Panel("Time in the queue", "s", _quantiles("queue_time_seconds")),
    ],
    "Tokens": [
        Panel("Tokens per second", "short", {"{{mode}}": _rate("realtime_tokens_total", "mode")}),
        Panel(
            "Prompt tokens found in the cache",
            "percentunit",
            {
                "share": _rate("cached_tokens_total", labels=_RANK)
                + " / "
                + _rate("prompt_tokens_total", labels=_RANK)
            },
        ),
        Panel(
            "Speculation",
            "short",
            {
                "tokens per verified row": f"sglang:spec_accept_length{{{_MODEL}}}",
                "share of drafts accepted": f"sglang:spec_accept_rate{{{_MODEL}}}",
            },
        ),
        Panel(
            "Output tokens per second, by tenant",
            "short",
            {"{{tenant}}": _rate("tenant_generation_tokens_total", "tenant")},
            is_stacked=True,
        ),
    ],
    "Memory": [
        Panel(
            "Pages by state",
            "short",
            {
                "{{pool}}, {{state}}": "sum by (pool, state) "
                f'(sglang:kv_pages{{{_RANK},state!="total"}})'
            },
            is_stacked=True,
        ),
        Panel(
            "Share of pages in use",
            "percentunit",
            {"rank {{dp_rank}}": _sum("token_usage", "dp_rank")},
        ),
        Panel(
            "Rows by state",
            "short",
            {"{{state}}": f'sum by (state) (sglang:rows{{{_RANK},state!="total"}})'},
            is_stacked=True,
        ),
        Panel(
            "Retracts and evictions per second",
            "short",
            {
                "retracts": _rate("num_retracted_requests_total", labels=_RANK),
                "of these, preempted": _rate("num_preempted_requests_total", labels=_RANK),
                "pages evicted": _rate("evicted_pages_total", labels=_RANK),
                "sessions evicted": _rate("evicted_sessions_total", labels=_RANK),
            },
        ),
        Panel(
            "Sessions",
            "short",
            {
                "open": f"sglang:num_streaming_sessions{{{_MODEL}}}",
                "tokens held, rank {{dp_rank}}": _sum("streaming_session_held_tokens", "dp_rank"),
            },
        ),
        Panel(
            "Defects",
            "short",
            {
                "compilations in the loop": "sum (sglang:compilations_total"
                f'{{{_MODEL},when="after_ready"}})',
                "memory defects": f"sum (sglang:memory_errors_total{{{_MODEL}}})",
            },
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's model."""
    ids, panels, top = count(1), list[dict[str, Any]](), 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": top, "w": _WIDTH * _COLUMNS, "h": 1}
        panels.append({"id": next(ids), "type": "row", "title": title, "gridPos": place})
        top += 1
        for number, panel in enumerate(row):
            line, column = divmod(number, _COLUMNS)
            place = {"x": column * _WIDTH, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_graph(next(ids), panel, place))
        top += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "uid": "sgl-jax",
        "title": "sgl_jax",
        "tags": ["sgl_jax", "llm"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _graph(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"drawStyle": "line", "fillOpacity": 20 if panel.is_stacked else 0}
    if panel.is_stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(panel.lines.items())
        ],
    }


def _variables() -> list[dict[str, Any]]:
    of_labels = [
        {
            "name": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": f"label_values(sglang:num_running_reqs, {name})",
            "includeAll": True,
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
        }
        for name in ("model_name", "dp_rank")
    ]
    return [{"name": "datasource", "type": "datasource", "query": "prometheus"}, *of_labels]


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text())
