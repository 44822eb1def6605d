"""Folders as they are published give the logits of the float64 reference (see `scripts`): with
heads, files, targets and lists of modules that config.json states wrongly or in part.
"""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.golden_server import GOLDEN, Chunk, Server, golden

TOLERANCE = 1e-3  # of the logits' range, as in `test_quantized_golden`


def assert_logits_of(name, folder):
    """Assert the golden logits of `name` for the prompt and for the tokens after it."""
    data, server = golden(name), Server(folder)
    prompt, expected = data["prompt"], data["prompt_logits"]
    allowed = TOLERANCE * np.ptp(expected)
    (logits,) = server.step([[Chunk(0, 0, prompt)]], 0)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=allowed)
    for step, token in enumerate(data["greedy"][:-1]):
        (logits,) = server.step([[Chunk(0, len(prompt) + step, np.array([token]))]], 1)
        np.testing.assert_allclose(logits, data["greedy_logits"][[step + 1]], rtol=0, atol=allowed)


@pytest.fixture
def llama(tmp_path):
    """A writable copy of a model with a head of its own, and its tensors."""
    folder = tmp_path / "llama"
    shutil.copytree(GOLDEN / "llama", folder)
    return folder, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "consolidated.safetensors"])
def test_files_next_to_model_safetensors_are_not_read(llama, name):
    folder, tensors = llama
    others = {f"base_model.{own}": tensor for own, tensor in tensors.items()}
    save_file(others | {"layers.0.wq.weight": np.zeros((4, 4), np.float32)}, folder / name)
    assert_logits_of("llama", folder)


def test_without_an_index_the_shards_are_read_and_no_other_file(llama):
    folder, tensors = llama
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
    save_file(
        {"layers.0.wq.weight": np.zeros((4, 4), np.float32)}, folder / "consolidated.safetensors"
    )
    assert_logits_of("llama", folder)


def tie(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def test_a_stored_head_that_is_not_the_embeddings_makes_the_logits(llama, caplog):
    folder, tensors = llama
    assert not np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    tie(folder)
    assert_logits_of("llama", folder)
    assert "lm_head.weight" in caplog.text
