"""The vision tower next to transformers, whatever rows of the table its vectors go to."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import ImageEncoding
from sgl_jax.executor.model_executor import ModelExecutor
from tests.models.golden_server import GOLDEN, TOLERANCE


def test_golden_images_differ_and_so_do_their_tokens() -> None:
    """Else the tests of images would pass without a tower."""
    for folder in (GOLDEN / "vision").iterdir():
        for name, weight in load_file(folder / "model.safetensors").items():
            assert weight.size == 1 or weight.std() > 0, f"{folder.name}: {name}"
        stored = np.load(folder / "golden.npz")
        vectors = [stored[f"vectors_{number}"] for number in range(3)]
        assert all(each.std(axis=0).mean() > 0.1 for each in vectors), folder.name
        means = np.stack([each.mean(axis=0) for each in vectors])
        assert means.std(axis=0).mean() > 0.01, folder.name


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("qwen3_vl", 1),
        ("gemma3", 1),
        ("gemma4", 1),
        pytest.param("gemma4_moe", 2, marks=pytest.mark.long),
        pytest.param("qwen3_vl", 2, marks=pytest.mark.long),
        pytest.param("qwen3_5", 1, marks=pytest.mark.long),
    ],
)
def test_vectors_of_images_are_those_of_transformers(family: str, tp: int) -> None:
    folder = GOLDEN / "vision" / family
    stored = np.load(folder / "golden.npz")
    executor = ModelExecutor(
        ServerArgs(
            model_path=str(folder),
            enable_multimodal=True,
            tp_size=tp,
            max_total_tokens=64,
            context_length=64,
            max_running_requests=2,
            warmup="none",
        )
    )
    num_slots = executor.sizes.image_slots
    random, used = np.random.default_rng(0), {}
    for number in range(3):
        pixels, vectors = stored[f"pixels_{number}"], stored[f"vectors_{number}"]
        free = np.setdiff1d(np.arange(num_slots, dtype=np.int32), list(used))
        slots = random.permutation(free)[: len(vectors)]
        height, width, _ = pixels.shape
        executor._encode([ImageEncoding(height, width, pixels.tobytes(), slots)])
        used |= dict(zip(slots.tolist(), vectors, strict=True))
    images = executor._state.images
    assert images is not None
    table = np.asarray(images.vectors)
    for slot, vector in used.items():
        np.testing.assert_allclose(table[slot], vector, atol=TOLERANCE, rtol=0)
    others = np.setdiff1d(np.arange(num_slots), list(used))
    assert not table[others].any()
    executor.close()
