"""What the planner refuses, at once."""

import json

import pytest

from sgl_jax.models.config import ModelConfigError
from sgl_jax.planner.arguments import known_models, parse_plan_request, read_config

GOOD = ["--model-path", "qwen3-8b", "--topology", "v6e-4", "--tp-size", "4"]


def test_a_published_model_is_known_by_name():
    assert "llama-3.3-70b" in known_models()
    config = read_config("llama-3.3-70b")
    assert (config.num_layers, config.hidden_size, config.num_kv_heads) == (80, 8192, 8)


@pytest.mark.parametrize("name", known_models())
def test_every_known_model_can_be_read(name):
    assert read_config(name).vocab_size > 100_000


def test_a_config_file_and_its_folder_are_the_same(tmp_path):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json"))


def test_a_model_that_is_nowhere_is_told_which_are_known():
    with pytest.raises(ModelConfigError, match=r"none of .*llama-3\.1-8b"):
        read_config("no-such-model")


def test_what_concerns_serving_alone_is_no_flag(capsys):
    with pytest.raises(SystemExit):
        parse_plan_request([*GOOD, "--port", "1"])
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "v6e-5"], "sizes of v6e are"),
        (["--tp-size", "8"], "needs 8 devices, found 4 in v6e-4"),
        (["--input-len", "0"], "--input-len must be at least 1"),
        (["--input-len", "50000"], "the context limit 40960"),
        (["--plot", "x.png"], "--plot needs --sweep"),
        (["--sweep", "--plot", "x.txt"], "--plot must end in one of .png"),
        (["--sweep", "--plot", "nowhere/x.png"], "there is no folder 'nowhere'"),
        (["--page-size", "100"], "power of two"),
        (["--model-path", "nowhere"], "no folder, no file"),
    ],
)
def test_bad_input_ends_with_a_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_plan_request([*GOOD, *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
