"""A tokenizer with placeholders of images, and small image files."""

import base64
import io
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
