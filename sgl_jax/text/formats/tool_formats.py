"""The formats of tool calls, one table each, by their names in flags."""

from sgl_jax.text.formats.call_form import ID, ID_END, WORD, CallForm, ToolFormat
from sgl_jax.text.formats.gemma import GEMMA
from sgl_jax.text.formats.lark import NUMBER
from sgl_jax.text.formats.pythonic import PYTHONIC
from sgl_jax.text.formats.tags import Tags

# Qwen 2.5 and 3 as well: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
_HERMES = CallForm(
    mark="<tool_call>",
    head='<tool_call>\n{"name": "',
    after_name='", "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
    names=None,
)

# Llama 3.1 to 3.3: {"name": "f", "parameters": {"a": 1}}; {...}, perhaps after the mark.
_LLAMA3 = CallForm(
    mark="<|python_tag|>",
    head='{"name": "',
    after_name='", "parameters": ',
    tail="}",
    between=";",
    names=None,
)

# Qwen3-Coder, Qwen3.5: each value is on separate lines. The model often leaves <tool_call> out.
_QWEN3_CODER = CallForm(
    mark="<tool_call>",
    head="<tool_call>\n<function=",
    after_name=">\n",
    tail="</function>\n</tool_call>",
    between="\n",
    arguments=Tags("<parameter=", ">\n", "\n</parameter>\n"),
    openings=("<tool_call>", "<function="),
)
_QWEN3_CODER_BARE = _QWEN3_CODER._replace(
    mark="<function=", head="<function=", needs_known_name=True
)

# GLM 4.5 to 4.7.
_GLM45 = CallForm(
    mark="<tool_call>",
    head="<tool_call>",
    after_name="\n",
    tail="</tool_call>",
    between="\n",
    arguments=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    openings=("<tool_call>",),
)

# [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]; since 2025 [TOOL_CALLS]f[ARGS]{"a": 1},
# perhaps with an id.
_MISTRAL_LIST = CallForm(
    mark="[TOOL_CALLS]",
    begin="[TOOL_CALLS][",
    head='{"name": "',
    after_name='", "arguments": ',
    tail="}",
    between=", ",
    end="]",
    names=None,
)
_MISTRAL_HEADED = CallForm(
    mark="[TOOL_CALLS]", head="[TOOL_CALLS]", after_name="[ARGS]", tail="", between=""
)
_MISTRAL_ID = f"[CALL_ID]{ID}{WORD}{ID_END}"
_MISTRAL = ToolFormat(
    (_MISTRAL_LIST, _MISTRAL_HEADED),
    also_read=tuple(
        _MISTRAL_HEADED._replace(after_name=text)
        for text in ("", _MISTRAL_ID, f"{_MISTRAL_ID}[ARGS]")
    ),
    has_short_ids=True,
)

# DeepSeek V3 and R1: function<｜tool▁sep｜>f and a block of JSON; V3.1: f<｜tool▁sep｜>{"a": 1}.
_DEEPSEEK_V3_1 = CallForm(
    mark="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    head="",
    after_name="<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    between="<｜tool▁call▁begin｜>",
    end="<｜tool▁calls▁end｜>",
)
_DEEPSEEK_V3 = _DEEPSEEK_V3_1._replace(
    head="function<｜tool▁sep｜>",
    after_name="\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    between="\n<｜tool▁call▁begin｜>",
)

# The text before the arguments is the call's id, such as functions.f:0.
_KIMI_K2 = CallForm(
    mark="<|tool_calls_section_begin|>",
    begin="<|tool_calls_section_begin|><|tool_call_begin|>",
    head=f"{ID}functions.",
    after_name=f":{NUMBER}{ID_END}<|tool_call_argument_begin|>",
    tail="<|tool_call_end|>",
    between="<|tool_call_begin|>",
    end="<|tool_calls_section_end|>",
)

TOOL_FORMATS = {
    "hermes": ToolFormat((_HERMES,)),
    "qwen25": ToolFormat((_HERMES,)),
    "qwen3_coder": ToolFormat((_QWEN3_CODER,), also_read=(_QWEN3_CODER_BARE,)),
    "llama3": ToolFormat((_LLAMA3,), first_of_calls="{;"),
    "mistral": _MISTRAL,
    "deepseekv3": ToolFormat((_DEEPSEEK_V3, _DEEPSEEK_V3_1)),
    "kimi_k2": ToolFormat((_KIMI_K2,), also_read=(_KIMI_K2._replace(head=ID),)),
    "glm45": ToolFormat((_GLM45,)),
    "gemma": GEMMA,
    "pythonic": PYTHONIC,
}
