"""A tokenizer with placeholders of images, and small image files."""

import base64
import io
import json
from pathlib import Path

from PIL import Image

from sgl_jax.core.image_input import ImageSettings
from sgl_jax.text.tokenizer import Tokenizer
from tests.support.tokenizers import save_with_template

SPECIALS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|tool|>", "<|system|>"]
# As Qwen's templates do.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_image_model(folder: Path) -> Path:
    return save_with_template(folder, TEMPLATE, SPECIALS)


def save_vision_model(folder: Path) -> Path:
    """Save the config of a tiny model with a vision tower, for dummy weights, and its tokenizer."""
    save_image_model(folder)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {each["content"]: each["id"] for each in added}
    text = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "eos_token_id": ids["</s>"],
        "rope_parameters": {"rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    }
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
    }
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": True,
        "image_token_id": ids[SPECIALS[1]],
        "vision_start_token_id": ids[SPECIALS[0]],
        "text_config": text,
        "vision_config": tower,
    }
    (folder / "config.json").write_text(json.dumps(config))
    size = {"shortest_edge": 64 * 64, "longest_edge": 512 * 512}
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    return folder


def image_settings(tokenizer: Tokenizer) -> ImageSettings:
    return ImageSettings(
        patch_size=16,
        merge_size=2,
        min_pixels=64 * 64,
        max_pixels=256 * 256,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        image_token_id=tokenizer.special_tokens[SPECIALS[1]],
    )


def image_file(color: str, height: int = 64, width: int = 64, kind: str = "png") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, kind)
    return file.getvalue()


def data_uri(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()
