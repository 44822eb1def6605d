"""Answers by schemas of many keywords, from a real server, validated by another library."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.schema_suite import main
from tests.live.live_server import LiveServer, live_server

pytestmark = pytest.mark.long

_NAME = {"type": "string", "maxLength": 8}
_SCHEMAS: dict[str, Any] = {
    "type": {"type": ["integer", "boolean", "null"]},
    "enum": {"enum": ["a", 1, None, {"b": [2]}]},
    "const": {"const": {"a": [1, "é"]}},
    "minimum and maximum": {"type": "integer", "minimum": -5, "maximum": 17},
    "exclusive limits": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$", "maxLength": 12},
    "format": {"type": "string", "format": "date-time"},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"type": "integer", "maximum": 9}, _NAME],
        "items": False,
        "minItems": 2,
    },
    "required": {
        "type": "object",
        "properties": {"a": _NAME, "b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "additionalProperties": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,4}$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "anyOf": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"const": "none"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "$ref": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "is_leaf": {"type": "boolean"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
                },
                "required": ["is_leaf", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("schemas"), "--check-memory", "busy") as server:
        yield server


def test_every_answer_is_valid(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [{"description": name, "schema": schema} for name, schema in _SCHEMAS.items()]
    (tmp_path / "keywords.json").write_text(json.dumps(groups))
    assert main([str(tmp_path), "--url", server.url, "--answers", "8"]) == 0
    summary = capsys.readouterr().out
    assert f"{len(_SCHEMAS)} schemas, 0 refused" in summary
    num_valid = int(summary.split(" others ")[1].split()[0])
    assert num_valid >= 0.8 * 8 * len(_SCHEMAS)
    server.assert_balance()
