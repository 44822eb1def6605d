"""A draft layer reads the vectors and the positions of images, as the model does."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sgl_jax.core.image_input import ImageInput
from sgl_jax.models.image_tokens import image_positions
from sgl_jax.scheduler.image_cache import image_lists
from tests.executor.draft_checks import check_drafts
from tests.executor.step_driver import Row
from tests.models.draft_reference import CONFIG, DraftReference, random_weights
from tests.models.golden_server import GOLDEN
from tests.support.long import long

pytestmark = pytest.mark.usefixtures("few_shapes")

VOCAB: int = CONFIG["vocab_size"]
SECTIONS = [2, 1, 1]
AXES = (0, 1, 2, 0)  # of the pairs that are rotated
TOKENS = {"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92}


def write_model(folder: Path, weights: dict[str, np.ndarray]) -> Path:
    """Write the checkpoint of a multimodal model: `weights`, and the golden model's tower."""
    golden = GOLDEN / "vision" / "qwen3_5"
    rope = CONFIG["rope_parameters"] | {"mrope_section": SECTIONS, "mrope_interleaved": True}  # type: ignore[operator]
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": CONFIG | {"rope_parameters": rope},
        "vision_config": json.loads((golden / "config.json").read_text())["vision_config"],
        "tie_word_embeddings": True,
        "eos_token_id": 95,
    }
    (folder / "config.json").write_text(json.dumps(config | TOKENS))
    preprocessor = (golden / "preprocessor_config.json").read_text()
    (folder / "preprocessor_config.json").write_text(preprocessor)
    tensors = load_file(golden / "model.safetensors")
    tower = {name: own for name, own in tensors.items() if ".visual." in name}
    text = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: w
        for name, w in weights.items()
    }
    save_file(tower | text, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("settings", [{}, *long({"tp_size": 2}, {"dp_size": 2})], ids=str)
def test_drafts_after_images_are_those_of_the_plain_layer(
    make_executor: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    weights = random_weights()
    executor = make_executor(
        model_path=str(write_model(tmp_path, weights)),
        load_format="safetensors",
        enable_multimodal=True,
        image_cache_size=0.0001,
        speculative_algorithm="MTP",
        speculative_num_draft_tokens=3,
        **settings,
    )
    state = executor._state
    table, side = state.images.vectors, executor.sizes.image_token_side
    vectors = np.random.default_rng(3).normal(0, 0.4, table.shape).astype(np.float32)
    of_ranks = vectors.reshape(executor.sizes.dp_size, executor.sizes.image_slots, -1)
    of_ranks[:] = of_ranks[0]
    written = jax.device_put(vectors, table.sharding)
    executor._state = state._replace(images=state.images._replace(vectors=written))
    # Images of 2 x 3 and 3 x 1 tokens, in other rows of the table.
    sizes = ((2, 3), (3, 1))
    prompt = [5, 9, *range(VOCAB + 4, VOCAB + 10), 7, 30, *range(VOCAB + 11, VOCAB + 14), 8, 2]
    images = [
        ImageInput(start=start, num_tokens=h * w, height=h * side, width=w * side, pixels=b"")
        for start, (h, w) in zip((2, 10), sizes, strict=True)
    ]
    lists = image_lists(images, side)
    places = image_positions(np.arange(64), np.broadcast_to(lists, (64, *lists.shape)))  # type: ignore[arg-type]
    reference = DraftReference(weights, of_ranks[0], np.asarray(places), AXES)
    started = [Row(k, 1, list(prompt), images=lists) for k in range(executor.sizes.dp_size)]
    assert check_drafts(executor, reference, 9, started) >= 5
