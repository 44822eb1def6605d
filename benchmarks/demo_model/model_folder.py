"""The Hugging Face folder of a model that ``train`` trains."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from benchmarks.demo_model.tasks import Message
from benchmarks.demo_model.tool import message_text

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# ChatML. The system message ends with the tools' names and parameters' names; calls have the format
# of Hermes and Qwen. `plain_messages` is the same in Python.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {%- set parameters = (tool.function.parameters or {}).properties or {} %}
        {{- ' ' + tool.function.name + '(' + parameters | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
            {{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def plain_messages(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> list[Message]:
    """Return messages with role and content only: calls as text, tools in the system message.

    `CHAT_TEMPLATE` renders the same text from messages with tools.
    """
    plain = [{"role": each["role"], "content": message_text(each)} for each in messages]
    if not tools:
        return plain
    functions = [tool["function"] for tool in tools]
    offers = [
        f"{each['name']}({', '.join(each['parameters']['properties'])})" for each in functions
    ]
    has_system = plain[0]["role"] == "system"
    lines = [plain[0]["content"]] if has_system else []
    told = "\n".join([*lines, " ".join(["Tools:", *offers])])
    return [{"role": "system", "content": told}, *plain[has_system:]]


def write_model_folder(
    folder: Path, model_config: dict[str, Any], tokenizer: Tokenizer, stored: dict[str, np.ndarray]
) -> None:
    """Write weights, configuration, tokenizer and chat template.

    Args:
        folder: created if missing; files of these names are replaced.
        model_config: config.json without the fields that come from the tokenizer.
        tokenizer: has `SPECIAL_TOKENS`.
        stored: the weights by their names in Hugging Face transformers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    end_of_text, _, end_of_turn = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    tokens = {"eos_token_id": end_of_turn, "pad_token_id": end_of_text}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_config["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    files = {
        "config.json": {**model_config, **tokens, "bos_token_id": None},
        "generation_config.json": {"do_sample": False, **tokens},
        "tokenizer_config.json": tokenizer_config,
        "special_tokens_map.json": special,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
