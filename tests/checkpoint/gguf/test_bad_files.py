"""A file that cannot be served is refused with one line that says why."""

import random
import struct

import numpy as np
import pytest

from sgl_jax.checkpoint.gguf.folder import model_folder
from sgl_jax.checkpoint.gguf.header import GgufError
from sgl_jax.launch_server import main
from tests.checkpoint.gguf.gguf_files import VOCABULARY, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refusal(file):
    """What is said of a file; no folder is left of it."""
    with pytest.raises(GgufError) as error:
        model_folder(str(file))
    message = str(error.value)
    assert "\n" not in message
    assert not [*(file.parent / "cache").rglob("config.json")]
    return message


def test_each_cut_of_a_file_is_refused(tmp_path):
    file = write_gguf("qwen3", tmp_path / "m.gguf")
    whole = file.read_bytes()
    sizes = [1, 3, 4, 7, 8, 23, 24, *range(25, 12_000, 307), *range(12_000, len(whole), 20_011)]
    for size in [*sizes, len(whole) - 1]:
        file.write_bytes(whole[:size])
        message = refusal(file)
        assert str(file) in message
        assert "truncated" in message or (size < 4 and "not a GGUF file" in message)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").touch()
    assert "is not a GGUF file" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("at", "data", "problem"),
    [
        (0, b"GGML", "is not a GGUF file: it does not begin with 'GGUF'"),
        (4, struct.pack("<I", 1), "has version 1 of GGUF; supported: 2 and 3"),
        (4, struct.pack(">I", 3), "has version 50331648 of GGUF"),
        (8, struct.pack("<Q", 2**63), "is truncated or damaged"),  # tensors
        (16, struct.pack("<Q", 2**63), "is truncated or damaged"),  # facts
        (24, struct.pack("<Q", 2**62), "is truncated or damaged"),  # a string's length
    ],
)
def test_a_file_with_another_beginning_is_refused(tmp_path, at, data, problem):
    file = write_gguf("qwen3", tmp_path / "m.gguf")
    content = bytearray(file.read_bytes())
    content[at : at + len(data)] = data
    file.write_bytes(content)
    assert problem in refusal(file)


def test_spoiled_bytes_are_refused_in_one_line_or_do_no_harm(tmp_path):
    """Of the header, a few at a time: whatever is wrong is found, or is only another model."""
    rng = random.Random(7)
    file = write_gguf("llama", tmp_path / "m.gguf")
    whole = file.read_bytes()
    refusals = []
    for _ in range(150):
        content = bytearray(whole)
        for at in rng.sample(range(whole.index(b"output_norm")), rng.choice([1, 4, 32])):
            content[at] = rng.randrange(256)
        file.write_bytes(content)
        try:
            model_folder(str(file))
        except GgufError as error:
            refusals.append(str(error))
    assert len(refusals) > 75
    assert not [message for message in refusals if "\n" in message]


@pytest.mark.parametrize(("kind", "shown"), [(99, "99"), (15, "Q8_K"), (26, "I32")])
def test_a_tensor_of_an_unknown_type_is_named(tmp_path, kind, shown):
    file = write_gguf("qwen3", tmp_path / "m.gguf")
    content = bytearray(file.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # the number of axes, and two
    content[at : at + 4] = struct.pack("<I", kind)
    file.write_bytes(content)
    assert f"tensor 'blk.0.attn_q.weight' in {str(file)!r} has the type {shown}" in refusal(file)


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        *(
            f"llama.{name}"
            for name in (
                *("block_count", "context_length", "embedding_length", "feed_forward_length"),
                *("attention.head_count", "attention.layer_norm_rms_epsilon"),
            )
        ),
        *(f"tokenizer.ggml.{name}" for name in ("model", "tokens", "token_type", "merges")),
    ],
)
def test_metadata_that_is_missing_is_named(tmp_path, key):
    file = write_gguf("llama", tmp_path / "m.gguf")
    # The writer always has the architecture, so the key is spoiled rather than left out.
    content = file.read_bytes()
    file.write_bytes(content.replace(key.encode(), key[:-1].encode() + b"_", 1))
    assert f"lacks {key!r}" in refusal(file)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"general.architecture": "mamba"}, "the architecture 'mamba'; supported: llama, qwen2,"),
        ({"llama.expert_count": 8}, "has experts"),
        ({"llama.block_count": "two"}, "num_hidden_layers must be a positive integer"),
        ({"llama.rope.freq_base": "big"}, "has wrong metadata: "),
        ({"general.alignment": 0}, "general.alignment in .* must be a positive integer"),
        ({"split.count": 3}, "is one of 3 parts: join them"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16 dimensions"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv in .* must be one integer"),
        ({"tokenizer.ggml.model": "bert"}, "a tokenizer of the kind 'bert'; supported: gpt2,"),
        ({"tokenizer.ggml.model": "llama"}, "lacks 'tokenizer.ggml.scores'"),
        ({"tokenizer.ggml.pre": "tekken"}, "splits text by the rule 'tekken'; supported: default"),
        ({"tokenizer.ggml.token_type": [1] * 9}, "token_type in .* an array of 250 numbers"),
        ({"tokenizer.ggml.tokens": ["a"] * 250}, "has a token twice"),
        ({"tokenizer.ggml.tokens": 3}, "tokens in .* must be an array of strings"),
        ({"tokenizer.ggml.merges": ["a x"]}, "not of two tokens to one: 'a x'"),
        ({"tokenizer.ggml.merges": ["a b a"]}, "not of two tokens to one: 'a b a'"),
        ({"tokenizer.ggml.unknown_token_id": 250}, "unknown_token_id in .* not a token: 250"),
        ({"tokenizer.ggml.bos_token_id": 250}, "bos_token_id must be a token id in [0, 250)"),
    ],
)
def test_metadata_that_is_not_supported_is_named(tmp_path, facts, problem):
    message = refusal(write_gguf("llama", tmp_path / "m.gguf", facts=facts))
    before, _, after = problem.partition(".*")
    assert before in message
    assert after in message


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("token_embd.weight", None, "lacks the tensor 'token_embd.weight'"),
        ("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32), "not those of Llama 3"),
        ("rope_freqs.weight", np.ones(5, np.float32), "not those of Llama 3"),
    ],
)
def test_tensors_of_which_the_config_depends_are_checked(tmp_path, name, array, problem):
    file = write_gguf("llama", tmp_path / "m.gguf", tensors={name: array})
    assert problem in refusal(file)


def test_the_command_says_it_and_ends(tmp_path, capsys):
    file = write_gguf("llama", tmp_path / "m.gguf", facts={"split.count": 2})
    assert main(["--model-path", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sgl_jax cannot serve: ")
    assert "is one of 2 parts" in line


def test_the_writer_of_these_tests_writes_a_good_file(tmp_path):
    assert model_folder(str(write_gguf("llama", tmp_path / "m.gguf"))).endswith("/m")
    assert len(set(VOCABULARY)) == 250
