"""Loading, encoding, and chat prompts."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.text.tokenizer import Tokenizer


def test_text_survives_the_round_trip(byte_level_tokenizer: Tokenizer) -> None:
    text = "Größe 😀\x00 and\ttabs"
    assert byte_level_tokenizer.decode(byte_level_tokenizer.encode(text)) == text


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ValueError, match="/no/such/folder"):
        Tokenizer.load("/no/such/folder")


def test_without_a_tokenizer_a_text_is_refused_for_what_is_missing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(tmp_path))
    assert not tokenizer.can_encode
    assert tokenizer.decode([1, 2, 3]) == ""
    with pytest.raises(InvalidRequestError, match=r"no tokenizer: send token ids \(input_ids\)"):
        tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "[1]"),
        ("tokenizer.json", '{"model": 5}'),
        ("tokenizer_config.json", "[1, 2]"),
        ("tokenizer_config.json", '{"bos_token": 7}'),
        ("tokenizer_config.json", '{"model_max_length": {}, "tokenizer_class": 5}'),
        ("tokenizer.json", "{"),
        ("special_tokens_map.json", "[]"),
    ],
)
def test_a_damaged_tokenizer_is_named_in_one_line(
    byte_level_folder: Path, tmp_path: Path, file: str, content: str
) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "damaged")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=r"cannot read a tokenizer from '.*/damaged'") as caught:
        Tokenizer.load(str(folder))
    assert f"{file}: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_template_file_is_named(byte_level_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.jinja"):
        Tokenizer.load(str(byte_level_folder), "/no/missing.jinja")


def test_chat_messages_become_the_templates_prompt(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    text = byte_level_tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|user|>hi</s><|assistant|>"
    assert ids[0] in byte_level_tokenizer.special_ids


def test_the_last_message_can_be_continued(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}],
        continue_final_message=True,
    )
    text = byte_level_tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|user|>hi</s><|assistant|>Well"


def with_template(folder: Path, tmp_path: Path, text: str) -> Tokenizer:
    """Load the tokenizer of `folder` with a chat template of its own."""
    template = tmp_path / "template.jinja"
    template.write_text(text)
    return Tokenizer.load(str(folder), str(template))


def test_a_template_file_takes_the_place_of_the_models(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(byte_level_folder, tmp_path, "{{ messages[0].content }}!{{ mood }}")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], template_args={"mood": "glad"}
    )
    assert tokenizer.decode(ids) == "hi!glad"


def test_what_a_template_raises_is_the_clients_error(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(
        byte_level_folder, tmp_path, "{{ raise_exception('roles must alternate') }}"
    )
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_an_id_beyond_the_vocabulary_has_no_text(
    byte_level_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer
) -> None:
    for tokenizer in (byte_level_tokenizer, sentencepiece_tokenizer):
        beyond = tokenizer.vocab_size + 3
        assert tokenizer.token_bytes(beyond) == b""
        assert tokenizer.decode([beyond]) == ""


_EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
_ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
_ALTERNATING = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
_SAID = [
    {"role": "system", "content": "one"},
    {"role": "user", "content": "hi"},
    {"role": "system", "content": "two"},
    {"role": "user", "content": "there"},
    {"role": "assistant", "content": "yes"},
]


@pytest.mark.parametrize(
    ("guard", "written"),
    [
        ("", "<system>one<user>hi<system>two<user>there<assistant>yes"),
        (_ONE_SYSTEM, "<system>one\n\ntwo<user>hi<user>there<assistant>yes"),
        (_ALTERNATING + _ONE_SYSTEM, "<system>one\n\ntwo<user>hi\n\nthere<assistant>yes"),
    ],
    ids=["as they are", "one system message", "roles alternate"],
)
def test_messages_are_merged_only_if_the_template_refuses_them(
    byte_level_folder: Path, tmp_path: Path, guard: str, written: str
) -> None:
    tokenizer = with_template(byte_level_folder, tmp_path, guard + _EACH)
    assert tokenizer.render_chat(_SAID) == written
    late = tokenizer.render_chat([*_SAID[1:2], _SAID[0]])
    assert late == ("<user>hi<system>one" if not guard else "<system>one<user>hi")


def test_a_template_that_refuses_every_form_says_why_of_the_first(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(
        byte_level_folder, tmp_path, "{{ raise_exception('there are ' ~ messages | length) }}"
    )
    with pytest.raises(InvalidRequestError, match="there are 5"):
        tokenizer.render_chat(_SAID)


TAGGED = "{% for key, value in arguments.items() %}<{{ key }}>{{ value }}{% endfor %}"
WAYS_OF_ARGUMENTS = {
    "{{ arguments | tojson }}": '{"city": "Rome"}',
    "{{ '' + arguments }}": '{"city": "Rome"}',
    "{{ arguments }}": '{"city": "Rome"}',
    "{{ arguments if arguments is string else arguments | tojson }}": '{"city": "Rome"}',
    TAGGED: "<city>Rome",
}


def with_arguments(folder: Path, tmp_path: Path, written: str) -> Tokenizer:
    """A tokenizer whose template writes contents, and calls in this way."""
    each = "{% for c in m.tool_calls or [] %}{% set arguments = c.function.arguments %}"
    said = f"{{{{ m.content }}}}{each}{written}{{% endfor %}}{{% endfor %}}"
    return with_template(folder, tmp_path, "{% for m in messages %}" + said)


def calling(*arguments: str) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize("written", WAYS_OF_ARGUMENTS)
def test_arguments_of_calls_are_objects_or_texts_as_the_template_wants(
    byte_level_folder: Path, tmp_path: Path, written: str
) -> None:
    tokenizer = with_arguments(byte_level_folder, tmp_path, written)
    prompt = WAYS_OF_ARGUMENTS[written]
    assert tokenizer.render_chat([calling('{"city": "Rome"}')]) == prompt
    # A tool's result may quote them as Python writes them.
    result = {"role": "tool", "content": "ran {'city': 'Rome'}"}
    told = tokenizer.render_chat([calling('{"city": "Rome"}'), result])
    assert told == prompt + "ran {'city': 'Rome'}"


@pytest.mark.parametrize("written", WAYS_OF_ARGUMENTS)
@pytest.mark.parametrize("cut", ['{"city": "Ro', '{"city": ', '{"ci', "{", "it is"])
def test_arguments_that_were_cut_off_are_written_up_to_the_cut(
    byte_level_folder: Path, tmp_path: Path, written: str, cut: str
) -> None:
    tokenizer = with_arguments(byte_level_folder, tmp_path, written)
    prompt = tokenizer.render_chat([calling('{"city": "Rome"}', cut, '{"city": "Rome"}')])
    whole = WAYS_OF_ARGUMENTS[written]
    readable = {'{"city": "Ro': "<city>Ro", "it is": "<arguments>it is"}.get(cut, "")
    assert prompt == whole + (readable if written == TAGGED else cut) + whole


def test_a_template_that_refuses_the_probe_gets_objects(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    refusing = "{{ raise_exception('no') if c.function.name == 'probe' }}{{ arguments | tojson }}"
    tokenizer = with_arguments(byte_level_folder, tmp_path, refusing)
    assert tokenizer.render_chat([calling('{"city":"Rome"}')]) == '{"city": "Rome"}'


def test_ids_of_special_tokens_are_found_by_their_texts(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.special_ids_of(frozenset({"<|user|>", "fox", "<é plain>"}))
    assert list(ids) == ["<|user|>"]
    assert byte_level_tokenizer.decode([*ids.values()], skip_special_tokens=False) == "<|user|>"
