"""A tokenizer or template that fails is found before a client uses it."""

import json
import shutil
from pathlib import Path

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.text.tokenizer import Tokenizer
from sgl_jax.text.tokenizer_check import check_tokenizer, check_vocabulary, load_tokenizer


def test_good_tokenizers_pass(
    byte_level_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer
) -> None:
    for tokenizer in (byte_level_tokenizer, sentencepiece_tokenizer):
        check_tokenizer(tokenizer, "here")
        check_vocabulary(tokenizer, "here", tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}", "does not work.*(?i:unexpected end)"),
        ("{{ messages[0].content.nothing() }}", "does not work"),
        ("{{ 1 / 0 }}", "does not work"),
        ("{# nothing #}", "writes an empty prompt"),
    ],
)
def test_a_template_that_fails_is_named(
    byte_level_folder: Path, tmp_path: Path, template: str, message: str
) -> None:
    file = tmp_path / "bad.jinja"
    file.write_text(template)
    with pytest.raises(ValueError, match=rf"the chat template '.*bad\.jinja' {message}"):
        load_tokenizer(ServerArgs(model_path=str(byte_level_folder), chat_template=str(file)))


def test_the_check_does_not_probe_the_template(
    byte_level_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that does not end would hold up the start: a worker bounds its time."""
    monkeypatch.setattr(Tokenizer, "abilities", property(lambda self: pytest.fail("probed")))
    for number, content in enumerate(("m.content", "m.content[0]['text']")):
        template = tmp_path / f"{number}.jinja"
        template.write_text("{% for m in messages %}{{ '' + " + content + " }}{% endfor %}")
        args = ServerArgs(model_path=str(byte_level_folder), chat_template=str(template))
        assert load_tokenizer(args).chat_template


def test_the_file_of_the_tokenizers_own_template_is_named(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "model")
    config = folder / "tokenizer_config.json"
    content = json.loads(config.read_text()) | {"chat_template": "{{ 1 / 0 }}"}
    config.write_text(json.dumps(content))
    beside = folder / "chat_template.jinja"
    beside.write_text("{{ 1 / 0 }}")
    for file in (beside, config):  # the first one counts
        with pytest.raises(ValueError, match=f"the chat template in '{file}' does not work"):
            load_tokenizer(ServerArgs(model_path=str(folder)))
        beside.unlink(missing_ok=True)


def test_a_template_file_that_is_no_text_is_named(byte_level_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jinja"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"cannot read the chat template .*bad\.jinja"):
        load_tokenizer(ServerArgs(model_path=str(byte_level_folder), chat_template=str(file)))


def test_a_tokenizer_that_loses_the_text_is_named(byte_level_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "lossy")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": ".+"}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="does not give back what it encodes"):
        load_tokenizer(ServerArgs(model_path=str(folder)))


def test_a_tokenizer_of_another_model_is_named(byte_level_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"'here' is not this model's: a plain text has id"):
        check_vocabulary(byte_level_tokenizer, "here", 64)
    with pytest.raises(
        ValueError, match=r"its eos token has id 1, outside the vocabulary \[0, 1\)"
    ):
        check_vocabulary(byte_level_tokenizer, "here", 1)


def test_a_tokenizer_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    load_tokenizer(ServerArgs(model_path=str(tmp_path)))
    with pytest.raises(ValueError, match="there is no tokenizer in"):
        load_tokenizer(ServerArgs(model_path="elsewhere", tokenizer_path=str(tmp_path)))
