"""What chat templates can write is found by probes, and conversations are put so that they can.

Each template does what one published family's does.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.text.call_arguments import ArgumentUse
from sgl_jax.text.template_abilities import TemplateAbilities
from sgl_jax.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import with_template

FOR, END = "{% for m in messages %}", "{% endfor %}"
SAID = "<{{ m.role }}>{{ m.content }}"
GUARD = (
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('Unexpected message role.') }}{% endif %}"
)
ALTERNATE = (
    "{% for m in told %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
)
LEADING = (
    "{% set told = messages %}{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content %}{% set told = messages[1:] %}{% endif %}"
)
PART = (
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
)


class Family(NamedTuple):
    template: str
    abilities: dict[str, Any]
    prompt: str  # of `CONVERSATION`


OTHERS = {"system": "anywhere", "developer": False, "successive_users": True, "content": "text"}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "one"},
    {"role": "developer", "content": "two"},
    {"role": "user", "content": "a"},
    {"role": "system", "content": "three"},
    {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
    {"role": "system", "content": "four"},
]
FIRST = "<system>one\n\ntwo\n\nthree\n\nfour"
AS_THEY_ARE = "<system>one<system>two<user>a<system>three<user>b\nc<assistant>d<user>e<system>four"
FAMILIES = {
    "any role is copied (ChatML, Llama 3)": Family(FOR + SAID + END, {}, AS_THEY_ARE),
    "any role is copied in another case (OpenChat)": Family(
        FOR + "<{{ m.role | title }}>{{ m.content }}" + END,
        {},
        AS_THEY_ARE.replace("<s", "<S").replace("<u", "<U").replace("<a", "<A"),
    ),
    "other roles are left out (Qwen 3)": Family(
        "{% for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}" + SAID + END,
        {},
        AS_THEY_ARE,
    ),
    "only the first may be a system message (Qwen 3.5)": Family(
        FOR + GUARD + SAID + END,
        {"system": "first"},
        FIRST + "<user>a<user>b\nc<assistant>d<user>e",
    ),
    "later system messages are left out (gpt-oss)": Family(
        "{% for m in messages %}{% if loop.first and m.role in ('system', 'developer') %}"
        "<developer>{{ m.content }}{% elif m.role in ('user', 'assistant', 'tool') %}"
        + SAID
        + "{% endif %}"
        + END,
        {"system": "first", "developer": True},
        "<developer>one\n\ntwo\n\nthree\n\nfour<user>a<user>b\nc<assistant>d<user>e",
    ),
    "developers have a role (GPT-like)": Family(
        FOR + "<{{ 'dev' if m.role == 'developer' else m.role }}>{{ m.content }}" + END,
        {"developer": True},
        AS_THEY_ARE.replace("<system>two", "<dev>two"),
    ),
    "the last system message counts (DeepSeek R1)": Family(
        "{% set ns = namespace(text='') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.text = m.content %}{% endfor %}<system>{{ ns.text }}"
        "{% for m in messages if m.role in ('user', 'assistant', 'tool') %}" + SAID + END,
        {"system": "first"},
        FIRST + "<user>a<user>b\nc<assistant>d<user>e",
    ),
    "system messages are written first (DeepSeek V3.1)": Family(
        "<system>{% for m in messages if m.role == 'system' %}{{ m.content }} {% endfor %}"
        "{% for m in messages if m.role in ('user', 'assistant', 'tool') %}" + SAID + END,
        {},
        "<system>one two three four <user>a<user>b\nc<assistant>d<user>e",
    ),
    "the system message is part of the last question (Mistral)": Family(
        LEADING
        + ALTERNATE
        + "<{{ m.role }}>{{ first ~ '|' if loop.last }}{{ m.content }}{% endfor %}",
        {"system": "first", "successive_users": False, "tool": False},
        "<user>a\n\nb\nc<assistant>d<user>one\n\ntwo\n\nthree\n\nfour|e",
    ),
    "the system message begins the first question (Gemma 3)": Family(
        "{% set told = messages %}{% set first = '' %}{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content if messages[0].content is string else "
        "messages[0].content[0].text %}{% set told = messages[1:] %}{% endif %}"
        + ALTERNATE
        + "<{{ m.role }}>{{ first ~ '|' if loop.first }}{% if m.content is string %}{{ m.content }}"
        "{% else %}" + PART + "{% endif %}{% endfor %}",
        {"system": "first", "successive_users": False, "tool": False},
        "<user>one\n\ntwo\n\nthree\n\nfour|a\n\nb\nc<assistant>d<user>e",
    ),
    "there is no system message (Gemma 2)": Family(
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% set told = messages %}" + ALTERNATE + SAID + END,
        {"system": "nowhere", "successive_users": False, "tool": False},
        "<user>one\n\ntwo\n\nthree\n\nfour\n\na\n\nb\nc<assistant>d<user>e",
    ),
    "other roles than two are left out (Phi 3)": Family(
        FOR + "{% if m.role in ('user', 'assistant') %}" + SAID + "{% endif %}" + END,
        {"system": "nowhere", "tool": False},
        "<user>one\n\ntwo\n\nthree\n\nfour<user>a<user>b\nc<assistant>d<user>e",
    ),
    "strings and lists are contents (Qwen 2.5 VL)": Family(
        FOR + "<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}" + PART
        + "{% endif %}" + END,
        {"content": "both"},
        AS_THEY_ARE.replace("b\nc", "bc"),
    ),
    "only lists are contents (SmolVLM)": Family(
        FOR + "<{{ m.role }}>" + PART + END,
        {"content": "parts"},
        AS_THEY_ARE.replace("b\nc", "bc"),
    ),
}  # fmt: skip


def test_a_merged_system_message_is_one_text_of_a_list(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    guarded = FAMILIES["only the first may be a system message (Qwen 3.5)"].template
    template = guarded.replace("{{ m.content }}", PART)
    tokenizer = with_template(byte_level_folder, tmp_path, template)
    assert tokenizer.abilities.system == "first"
    assert tokenizer.abilities.content == "parts"
    assert tokenizer.render_chat(CONVERSATION) == FIRST + "<user>a<user>bc<assistant>d<user>e"


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_are_put_as_the_template_takes_them(
    name: str, byte_level_folder: Path, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    tokenizer = with_template(byte_level_folder, tmp_path, family.template)
    found = msgspec.structs.asdict(tokenizer.abilities)
    assert {key: found[key] for key in OTHERS} == OTHERS | {
        key: value for key, value in family.abilities.items() if key in OTHERS
    }
    assert found["tool"] == family.abilities.get("tool", True)
    assert tokenizer.render_chat(CONVERSATION) == family.prompt


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_that_every_template_takes_is_left_as_it_is(
    name: str, byte_level_folder: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(byte_level_folder, tmp_path, FAMILIES[name].template)
    told = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "d"}]
    prompt = tokenizer.render_chat([*told, *told[:1]]).replace("<system>", "").replace("|", "")
    assert prompt.lower() == "<user>a<assistant>d<user>a"


@pytest.mark.parametrize("name", [name for name in FAMILIES if "tool" in FAMILIES[name].abilities])
def test_results_that_the_template_does_not_write_are_refused(
    name: str, byte_level_folder: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(byte_level_folder, tmp_path, FAMILIES[name].template)
    told = [{"role": "user", "content": "a"}, {"role": "tool", "content": "rain"}]
    with pytest.raises(InvalidRequestError, match="does not write results of tools") as caught:
        tokenizer.render_chat(told)
    assert caught.value.param == "messages"


THINKING = {
    FOR + SAID + "{{ m.reasoning_content or '' }}" + END: "kept",
    # Qwen 3, GLM 4.5
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + FOR
    + SAID
    + "{{ m.reasoning_content or '' if loop.index0 > ns.last }}"
    + END: "last turn",
    FOR + SAID + END: "dropped",
}  # fmt: skip


@pytest.mark.parametrize("template", THINKING)
def test_it_is_found_which_reasoning_is_written_again(
    template: str, byte_level_folder: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(byte_level_folder, tmp_path, template)
    assert tokenizer.abilities.thinking == THINKING[template]


def test_forms_of_arguments_and_results_are_found_together(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    each = "{% for c in m.tool_calls or [] %}{{ '' + c.function.arguments }}{% endfor %}"
    tokenizer = with_template(byte_level_folder, tmp_path, FOR + SAID + each + END)
    arguments = ArgumentUse(takes_objects=False, takes_text=True)
    assert tokenizer.abilities == TemplateAbilities(arguments=arguments)


def test_results_stay_texts_where_a_list_of_them_has_another_form(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    """As in GLM 4.5, which writes each item of such a list whole."""
    said = "{% if m.role == 'tool' and m.content is not string %}{{ m.content }}{% endif %}"
    both = FAMILIES["strings and lists are contents (Qwen 2.5 VL)"].template
    tokenizer = with_template(byte_level_folder, tmp_path, both.replace(FOR, FOR + said))
    assert tokenizer.abilities.content == "both"
    parts = [{"type": "text", "text": "rain"}, {"type": "text", "text": "12"}]
    told: list[Any] = [{"role": "user", "content": "a"}, {"role": "tool", "content": parts}]
    assert tokenizer.render_chat(told) == "<user>a<tool>rain\n12"


def test_a_template_that_refuses_all_probes_gets_messages_as_they_are(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    picky = "{{ raise_exception('no') if messages[0].content[:5] == 'probe' }}" + FOR + SAID + END
    tokenizer = with_template(byte_level_folder, tmp_path, picky)
    assert tokenizer.abilities == TemplateAbilities()
    assert tokenizer.render_chat(CONVERSATION) == AS_THEY_ARE


def test_a_template_is_probed_once(byte_level_folder: Path) -> None:
    tokenizer = Tokenizer.load(str(byte_level_folder))
    assert tokenizer.abilities is tokenizer.abilities


# -- what a template does with tools alone -------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
TWO_SYSTEMS = [
    {"role": "system", "content": "S1"},
    {"role": "user", "content": "Q"},
    {"role": "system", "content": "S2"},
]


def parts_of(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def called(content: Any, **fields: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **fields}


def test_a_guard_that_holds_with_tools_alone_is_found(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    guard = "{% if tools and m.role == 'system' and not loop.first %}{{ raise_exception('') }}"
    template = FOR + guard + "{% endif %}" + SAID + END
    tokenizer = with_template(byte_level_folder, tmp_path, template)
    assert tokenizer.abilities.system == "first"
    assert tokenizer.render_chat(TWO_SYSTEMS, tools=TOOLS) == "<system>S1\n\nS2<user>Q"


def test_a_form_that_the_probes_do_not_foresee_is_refused_only_if_simpler_ones_are(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    guard = "{% if m.content == 'S2' %}{{ raise_exception('') }}{% endif %}"
    tokenizer = with_template(byte_level_folder, tmp_path, FOR + guard + SAID + END)
    assert tokenizer.abilities.system == "anywhere"
    assert tokenizer.render_chat(TWO_SYSTEMS) == "<system>S1\n\nS2<user>Q"
    with pytest.raises(InvalidRequestError):
        tokenizer.render_chat(TWO_SYSTEMS[2:])


def test_a_list_is_written_as_texts_where_tools_or_calls_come_with_it(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    both = FAMILIES["strings and lists are contents (Qwen 2.5 VL)"].template
    with_tools = "{% if tools %}{{ messages[0].content }}{% endif %}"
    tokenizer = with_template(byte_level_folder, tmp_path, with_tools + both)
    assert tokenizer.abilities.content == "text"
    system = {"role": "system", "content": parts_of("S1", "S2")}
    told: list[Any] = [system, {"role": "user", "content": "Q"}]
    assert tokenizer.render_chat(told, tools=TOOLS).startswith("S1\nS2")
    beside = "{% if m.tool_calls %}[{{ m.content }}]{% endif %}"
    template = both.replace(FOR, FOR + beside)
    tokenizer = with_template(byte_level_folder, tmp_path, template)
    assert tokenizer.abilities.content == "both"
    told = [{"role": "user", "content": "Q"}, called(parts_of("A1", "A2"))]
    assert "[A1\nA2]" in tokenizer.render_chat(told, tools=TOOLS)


def test_reasoning_is_left_out_where_a_template_takes_none_beside_a_text_and_a_call(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    """As in gpt-oss."""
    guard = (
        "{% if m.tool_calls and m.content and m.reasoning_content %}"
        "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    )
    thought = "{{ m.reasoning_content or '' }}"
    tokenizer = with_template(byte_level_folder, tmp_path, FOR + guard + SAID + thought + END)
    question = {"role": "user", "content": "Q"}
    told = [question, called("A", reasoning_content="R")]
    assert tokenizer.render_chat(told, tools=TOOLS) == "<user>Q<assistant>A"
    told = [question, called("", reasoning_content="R")]
    assert tokenizer.render_chat(told, tools=TOOLS) == "<user>Q<assistant>R"


def test_roles_alternate_where_a_template_wants_it_behind_results_too(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    """As in Mistral v0.3, which leaves calls and results out of the count, and in Gemma."""
    alternate = (
        "{% set ns = namespace(n=0) %}" + FOR + "{% if m.role != 'tool' and not m.tool_calls %}"
        "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}" + SAID + END
    )
    tokenizer = with_template(byte_level_folder, tmp_path, alternate)
    question, result = {"role": "user", "content": "Q"}, {"role": "tool", "content": "rain"}
    told = [question, called(""), result, {"role": "user", "content": "hint"}]
    assert tokenizer.render_chat(told, tools=TOOLS) == "<user>Q<assistant><tool>rain\n\nhint"
    answers = [{"role": "assistant", "content": text} for text in ("A", "B")]
    assert tokenizer.render_chat([question, *answers]) == "<user>Q<assistant>A\n\nB"
