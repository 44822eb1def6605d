"""The Hugging Face folder of a model that ``train_demo_model`` trains."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_model_folder(
    folder: Path, model_config: dict[str, Any], tokenizer: Tokenizer, stored: dict[str, np.ndarray]
) -> None:
    """Write weights, configuration, tokenizer and chat template.

    Args:
        folder: made if it is not there; files of these names are replaced.
        model_config: of config.json, but for what the tokenizer says.
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
