"""Weights that a trainer hands over, as the tensors of a Hugging Face checkpoint.

They are a tree, or an iterator of pairs of name and array. tunix stores a projection as
[inputs, heads, head size] or [inputs, outputs], and the experts of a layer as one array; a
checkpoint has matrices [outputs, inputs], one per expert.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sgl_jax.checkpoint.array_tensors import Flat, Transposed, on_host

_BUCKET_BYTES = 2**28

# A tree of arrays (nested mappings, such as an `nnx.State`), or pairs of name and array.
Weights = Mapping[Any, Any] | Iterable[tuple[str, Any]]


class _Rule(NamedTuple):
    pattern: str
    name: str
    num_inputs: int | None  # leading axes of a matrix that are inputs; None: not a matrix


_LAYER, _OWN = r"(?:model\.)?layers\.(\d+)\.", "model.layers.{}."
_RULES = (
    _Rule(r"embedder\.input_embedding", "model.embed_tokens.weight", None),
    _Rule(r"final_norm\.w", "model.norm.weight", None),
    _Rule(r"lm_head\.w", "lm_head.weight", 1),
    _Rule(_LAYER + r"attn\.([qkv])_proj\.w", _OWN + "self_attn.{}_proj.weight", 1),
    _Rule(_LAYER + r"attn\.([qkv])_bias", _OWN + "self_attn.{}_proj.bias", None),
    _Rule(_LAYER + r"attn\.o_proj\.w", _OWN + "self_attn.o_proj.weight", 2),
    _Rule(_LAYER + r"attn\.([qk])_norm\.w", _OWN + "self_attn.{}_norm.weight", None),
    _Rule(_LAYER + r"(\w+_layernorm)\.w", _OWN + "{}.weight", None),
    _Rule(_LAYER + r"mlp\.(\w+_proj)\.kernel", _OWN + "mlp.{}.weight", 1),
    _Rule(_LAYER + r"mlp\.router\.kernel", _OWN + "mlp.gate.weight", 1),
    _Rule(_LAYER + r"mlp\.(\w+_proj)", _OWN + "mlp.experts.{expert}.{}.weight", 1),
)


def as_checkpoint_tensors(name: str, array: Any) -> Iterator[tuple[str, Any]]:
    """Yield a trainer's parameter as tensors of a checkpoint; a name of none of its as it is."""
    for rule in _RULES:
        match = re.fullmatch(rule.pattern, name)
        if match is None:
            continue
        fill_in = partial(rule.name.format, *match.groups())
        if rule.num_inputs is None:
            yield fill_in(), Flat(array) if rule.name.endswith(".bias") else array
        elif "{expert}" in rule.name:
            for expert in range(array.shape[0]):
                yield fill_in(expert=expert), Transposed(array, rule.num_inputs, expert)
        else:
            yield fill_in(), Transposed(array, rule.num_inputs)
        return
    yield name, array


def in_buckets(weights: Weights) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the tensors of `weights` by their names in a checkpoint, and True with the last.

    A tree is a single bucket and is not copied. An iterator may create arrays one at a time, so its
    buckets are copies in host memory: each array can be freed before the next is created.
    """
    if isinstance(weights, Mapping):
        yield dict(_named(weights)), True
        return
    bucket: dict[str, Any] = {}
    num_bytes = 0
    for name, array in weights:
        copy = np.array(on_host(name, array))
        bucket.update(as_checkpoint_tensors(name, copy))
        num_bytes += copy.nbytes
        if num_bytes >= _BUCKET_BYTES:
            yield bucket, False
            bucket, num_bytes = {}, 0
    yield bucket, True


def _named(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _named(value, f"{prefix}{key}.")
        else:
            array = value.get_value() if hasattr(value, "get_value") else value  # nnx.Variable
            yield from as_checkpoint_tensors(f"{prefix}{key}", array)
