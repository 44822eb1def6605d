"""Which folders hold models that make embeddings, and why others do not."""

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.embedding_model import embedding_refusal
from tests.support.embedding_models import POOLING, write_modules


def test_a_model_of_sentence_transformers_makes_embeddings(tmp_path: Path) -> None:
    write_modules(tmp_path)
    assert embedding_refusal(tmp_path) == ""
    write_modules(tmp_path, {"pooling_mode": "lasttoken", "include_prompt": True})
    assert embedding_refusal(tmp_path) == ""


def test_the_setting_needs_no_files(tmp_path: Path) -> None:
    assert embedding_refusal(tmp_path) == "its folder has no modules.json"
    assert embedding_refusal(tmp_path, is_embedding=True) == ""


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean_tokens"),
        (POOLING | {"pooling_mode_cls_token": True}, "lasttoken, cls_token"),
        ({"pooling_mode_lasttoken": False}, "none"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_another_pooling_is_named(tmp_path: Path, pooling: dict[str, Any], named: str) -> None:
    write_modules(tmp_path, pooling)
    assert embedding_refusal(tmp_path).startswith(f"its pooling is {named}, and only")


def test_a_module_that_is_not_computed_is_named(tmp_path: Path) -> None:
    write_modules(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (tmp_path / "modules.json").write_text(json.dumps([*modules, dense]))
    assert embedding_refusal(tmp_path).startswith("the module Dense of its modules.json")
    (tmp_path / "modules.json").write_text(json.dumps(modules[:1]))
    assert embedding_refusal(tmp_path) == "its modules.json has no Pooling"


@pytest.mark.parametrize("text", ["[", "7", "[7]", "[{}]", '[{"type": "Pooling", "path": 7}]'])
def test_a_damaged_file_is_a_reason_not_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    assert embedding_refusal(tmp_path).startswith("its modules.json cannot be read")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    assert embedding_refusal(tmp_path) == "its folder has no 1_Pooling/config.json"
    modules = [{"type": "Pooling", "path": "../elsewhere"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert embedding_refusal(tmp_path) == "its folder has no ../elsewhere/config.json"
