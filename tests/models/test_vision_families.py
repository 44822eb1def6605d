"""The settings of a model's images, read from its folder."""

import json
from pathlib import Path
from typing import Any

import pytest

import sgl_jax.planner
from sgl_jax.core.image_input import image_token_ids
from sgl_jax.models.config_fields import ModelConfigError
from sgl_jax.models.vision_families import read_image_settings, read_vision
from tests.models.golden_server import GOLDEN

PUBLISHED = Path(sgl_jax.planner.__file__).parent / "models"
_CONFIG = {
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
    "image_token_id": 7,
    "vision_start_token_id": 8,
    "vision_end_token_id": 9,
}


def _folder(path: Path, preprocessor: dict[str, Any], **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**_CONFIG, **config}))
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return path


def test_published_settings_are_read(tmp_path: Path) -> None:
    size = {"shortest_edge": 4096, "longest_edge": 65536}
    folder = _folder(tmp_path, {"size": size, "image_mean": [0.1, 0.2, 0.3], "patch_size": 16})
    settings = read_image_settings(folder)
    assert settings is not None
    assert (settings.min_pixels, settings.max_pixels) == (4096, 65536)
    assert settings.mean == (0.1, 0.2, 0.3)
    assert settings.std == (0.5, 0.5, 0.5)
    assert settings.image_token_id == 7
    assert settings.num_tokens(64, 96) == 6


def test_text_models_have_no_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    assert read_image_settings(tmp_path) is None


@pytest.mark.parametrize(
    ("preprocessor", "named"),
    [
        ({"resample": 2}, "resample"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"patch_size": 14}, "patch_size"),
        ({"min_pixels": 4096, "max_pixels": 1024}, "longest_edge"),
        ({"max_pixels": 100, "min_pixels": 1}, "one token"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std"),
    ],
)
def test_unsupported_settings_are_named(
    tmp_path: Path, preprocessor: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelConfigError, match=named):
        read_image_settings(_folder(tmp_path, preprocessor))


def test_pseudo_ids_tell_images_apart() -> None:
    pixels = bytes(range(48))
    ids = image_token_ids(4, 4, pixels, 20, vocab_size=1000)
    assert min(ids) >= 1000
    assert max(ids) < 2**31
    assert len(set(ids)) == len(ids)
    assert ids[:5] == image_token_ids(4, 4, pixels, 5, vocab_size=1000)
    others = image_token_ids(2, 8, pixels, 20, 1000), image_token_ids(4, 4, pixels[::-1], 20, 1000)
    assert all(not set(ids) & set(other) for other in others)


@pytest.mark.parametrize(
    ("family", "side", "expansion"),
    [("gemma3", 8, ("\n\n", 241, 240, 242, "\n\n")), ("gemma4", 12, (241, 240, 242))],
)
def test_gemma_writes_tokens_around_an_image(
    family: str, side: int, expansion: tuple[int | str, ...]
) -> None:
    settings = read_image_settings(GOLDEN / "vision" / family)
    assert settings is not None
    assert settings.side_multiple == side
    assert settings.expansion == expansion
    assert settings.placeholder_id == (241 if family == "gemma3" else 240)


def test_other_image_settings_of_gemma_are_named(tmp_path: Path) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": {"image_size": 896, "patch_size": 14},
    }
    for preprocessor, named in (
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"size": {"height": 224, "width": 224}}, "896"),
    ):
        with pytest.raises(ModelConfigError, match=named):
            read_image_settings(_folder(tmp_path, preprocessor, **config))


@pytest.mark.parametrize(
    ("model", "image_tokens"),
    [("qwen3-vl-8b", 0), ("qwen3-vl-30b-a3b", 0), ("gemma-3-27b", 256)],
)
def test_towers_of_published_models_are_read(model: str, image_tokens: int) -> None:
    """The planner compiles their steps with images (`tests/tpu/test_images.py`)."""
    path = PUBLISHED / f"{model}.json"
    hidden_size = json.loads(path.read_text())["text_config"]["hidden_size"]
    vision = read_vision(path, hidden_size)
    assert vision.depth == 27
    assert vision.out_hidden_size == hidden_size
    if image_tokens:
        assert vision.images.num_tokens(896, 896) == image_tokens
