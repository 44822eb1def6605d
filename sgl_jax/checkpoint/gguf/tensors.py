"""The tensors of a GGUF file by their names in transformers, converted to floats when read."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from sgl_jax.checkpoint.gguf.header import GgufError, Header, TensorEntry, read_header

_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_GEMMA3_LAYER = _OF_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Factors of Llama 3's rotary embedding, which the config has.
ROPE_FACTORS = "rope_freqs.weight"
_ROWS_AT_ONCE = 1024
_STORED = {
    GGMLQuantizationType.F16: ("F16", np.float16),
    GGMLQuantizationType.BF16: ("BF16", ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor, with the methods of a safetensors slice."""

    blocks: NDArray[np.uint8]  # [..., blocks of a row, bytes of a block], in the file
    entry: TensorEntry
    order: NDArray[np.intp] | None = None  # stored row of each row
    excess: float = 0.0  # stored numbers are this much larger

    def get_shape(self) -> list[int]:
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        """Return the dtype of slices: float32 for quantized tensors."""
        return "F32" if self.excess else _STORED.get(self.entry.kind, ("F32",))[0]

    def __getitem__(self, index: tuple[slice, ...]) -> NDArray[Any]:
        """Return a part. Only the blocks that hold it are read and converted."""
        *rows, columns = index
        size, kind = self.entry.block_sizes[0], self.entry.kind
        start, stop, _ = columns.indices(self.entry.shape[-1])
        first, *rest = *rows, slice(start // size, -(-stop // size))
        blocks = self.blocks[(first if self.order is None else self.order[first], *rest)]
        data = np.ascontiguousarray(blocks).reshape(*blocks.shape[:-2], -1)
        numbers = data.view(_STORED[kind][1]) if kind in _STORED else _as_floats(data, self.entry)
        skipped = start // size * size
        numbers = numbers[..., start - skipped : stop - skipped]
        return numbers.astype(np.float32) - np.float32(self.excess) if self.excess else numbers


def _as_floats(data: NDArray[np.uint8], entry: TensorEntry) -> NDArray[np.float32]:
    """Convert rows of blocks, some at a time: the library makes a second copy of its result."""
    size, num_bytes = entry.block_sizes
    rows = data.reshape(-1, data.shape[-1])
    numbers = np.empty((len(rows), rows.shape[-1] // num_bytes * size), np.float32)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        numbers[part] = dequantize(rows[part], entry.kind)
    return numbers.reshape(*data.shape[:-1], -1)


def open_tensors(path: Path) -> Iterator[tuple[str, GgufTensor]]:
    """Yield each tensor with its name in transformers. Raise GgufError.

    Llama's queries and keys are stored with the halves of a head's rows interleaved, Gemma's norms
    plus 1, as llama.cpp computes with them.
    """
    header = read_header(path)
    architecture = header.required("general.architecture")
    heads = {
        "attn_q": header.required(f"{architecture}.attention.head_count"),
        "attn_k": header.metadata.get(f"{architecture}.attention.head_count_kv"),
    }
    heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
    data = np.memmap(path, np.uint8, "r")
    for stored, entry in header.tensors.items():
        if stored == ROPE_FACTORS:
            continue
        name, part = hf_name(stored, architecture)
        order, excess = None, 0.0
        if architecture == "llama" and part in heads:
            order = _row_order(header, stored, entry.shape[0], heads[part])
        if architecture == "gemma3" and part.endswith("norm"):
            excess = 1.0
        yield name, GgufTensor(_blocks(data, entry), entry, order, excess)


def hf_name(stored: str, architecture: str) -> tuple[str, str]:
    """Return the name of a tensor in transformers, and llama.cpp's name of its module.

    A tensor with an unknown name keeps it.
    """
    match = _NAME.fullmatch(stored)
    if match is None:
        return stored, ""
    layer, part, kind = match.groups()
    names = _WHOLE if layer is None else _OF_GEMMA3_LAYER if architecture == "gemma3" else _OF_LAYER
    if part not in names:
        return stored, part
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{names[part]}.{kind}", part


def read_floats(path: Path, entry: TensorEntry) -> NDArray[np.float32]:
    """Return a whole small tensor."""
    tensor = GgufTensor(_blocks(np.memmap(path, np.uint8, "r"), entry), entry)
    return tensor[(slice(None),) * len(entry.shape)].astype(np.float32)


def _blocks(data: NDArray[np.uint8], entry: TensorEntry) -> NDArray[np.uint8]:
    numbers, num_bytes = entry.block_sizes
    own = data[entry.offset : entry.offset + entry.nbytes]
    return own.reshape(*entry.shape[:-1], entry.shape[-1] // numbers, num_bytes)


def _row_order(header: Header, stored: str, num_rows: int, num_heads: Any) -> NDArray[np.intp]:
    """Return the stored row of each row: row (half, i) of a head is stored as row (i, half)."""
    if not isinstance(num_heads, int) or num_heads < 1 or num_rows % (2 * num_heads):
        raise GgufError(
            f"tensor {stored!r} in {str(header.path)!r} has {num_rows} rows, which {num_heads!r} "
            f"heads cannot share"
        )
    stored_rows = np.arange(num_rows).reshape(num_heads, -1, 2)
    return stored_rows.swapaxes(1, 2).reshape(-1)
