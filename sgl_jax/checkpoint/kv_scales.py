"""Scales of an 8-bit KV cache, from a file or from a checkpoint.

The file is written once per model, and read by its servers. It is JSON with the cache's dtype, the
model's shape, and a scale for each layer and KV head, separately for K and V. A file for a model of
another shape is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.kernels.attention.cache_dtype import EIGHT_BITS, GREATEST, cache_dtype_name
from sgl_jax.layers.parameter import Declaration
from sgl_jax.layers.parameter import Path as ParamPath
from sgl_jax.models.config import ModelConfig

KV_SCALES_FILE = "kv_scales.json"
KV_CACHE_DTYPE = cache_dtype_name(EIGHT_BITS)


class ScalesByHead(NamedTuple):
    """Divisors of K and V before they are cached; float32 [layers, kv_heads]."""

    k: NDArray[np.float32]
    v: NDArray[np.float32]

    @classmethod
    def fitting(cls, k_absmax: Any, v_absmax: Any, margin: float) -> "ScalesByHead":
        """Return scales that fit K and V of up to `margin` times the greatest absolute values seen.

        `k_absmax` and `v_absmax` are [layers, kv_heads]. Each scale is rounded up to a power of
        two: multiplying by it is exact, and an 8-bit float has the same relative precision at any
        magnitude. A head with only zeros gets the scale 1.
        """
        exact = np.asarray([k_absmax, v_absmax], np.float64) * margin / GREATEST
        exponents = np.ceil(np.log2(exact, where=exact > 0, out=np.zeros_like(exact)))
        return cls(*np.exp2(exponents).astype(np.float32))


def write_kv_scales(path: Path, scales: ScalesByHead, config: ModelConfig) -> None:
    content = {
        "kv_cache_dtype": KV_CACHE_DTYPE,
        "model": _shape_of(config),
        "k": scales.k.tolist(),
        "v": scales.v.tolist(),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_kv_scales(path: Path, config: ModelConfig) -> ScalesByHead:
    """Read a file that `write_kv_scales` wrote.

    Raises CheckpointError if it is missing or malformed, or is not for `config`'s model.
    """
    try:
        content = json.loads(path.read_text())
        found = {name: content[name] for name in ("kv_cache_dtype", "model")}
        scales = ScalesByHead(*(np.asarray(content[name], np.float32) for name in "kv"))
    except OSError as error:
        raise CheckpointError(f"cannot read KV scales: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{str(path)!r} is no file of KV scales: it lacks {error}") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{str(path)!r} is no file of KV scales: {error}") from error
    expected = {"kv_cache_dtype": KV_CACHE_DTYPE, "model": _shape_of(config)}
    for name, value in expected.items():
        if found[name] != value:
            raise CheckpointError(
                f"the KV scales in {str(path)!r} are for {name} {found[name]}, not {value}"
            )
    for array in scales:
        if array.shape != (config.num_layers, config.num_kv_heads):
            raise CheckpointError(f"{str(path)!r} lacks scales: one for each layer and KV head")
        if not (np.isfinite(array) & (array > 0)).all():
            raise CheckpointError(f"KV scales must be above 0, {str(path)!r} has others")
    return scales


def stored_kv_scales(folder: Path, config: ModelConfig) -> ScalesByHead:
    """Return the scales of a checkpoint, one number a layer for K and one for V.

    They are tensors `self_attn.k_scale` and `self_attn.v_scale` of layers with KV, or
    `self_attn.k_proj.k_scale` and `self_attn.v_proj.v_scale`; an orbax checkpoint has them in
    `KV_SCALES_FILE`. Raises CheckpointError if scales are missing, or are not numbers above 0.
    """
    if (folder / KV_SCALES_FILE).is_file():
        return read_kv_scales(folder / KV_SCALES_FILE, config)
    scales = np.ones((2, config.num_layers, config.num_kv_heads), np.float32)
    with TensorFiles(folder) as files:
        for kind, own in zip("kv", scales, strict=True):
            for layer, spec in enumerate(config.layers):
                if spec.has_attention:
                    own[layer] = _stored_scale(files, f".layers.{layer}.self_attn.", kind)
    return ScalesByHead(*scales)


def _stored_scale(files: TensorFiles, attention: str, kind: str) -> float:
    suffixes = f"{attention}{kind}_scale", f"{attention}{kind}_proj.{kind}_scale"
    name = next((own for own in files.shapes if own.endswith(suffixes)), None)
    if name is None:
        raise CheckpointError(f"no tensor *{suffixes[0]}, though the KV cache is quantized")
    tensor = np.asarray(files.read(name, ()), np.float32)
    if tensor.size != 1 or not np.isfinite(tensor).all() or tensor.min() <= 0:
        raise CheckpointError(f"{name} must be one number above 0")
    return float(tensor.reshape(()))


def place_kv_scales(
    scales: ScalesByHead, declared: Mapping[ParamPath, Declaration]
) -> dict[ParamPath, jax.Array]:
    """Return the parameters of `layers.attention.KVScales`, in their shardings.

    If a KV head is copied to several chips, its scale is copied too.
    """

    def place(array: NDArray[np.float32], own: Declaration) -> jax.Array:
        target = own.array
        copied = np.repeat(array[list(own.layers)], target.shape[1] // array.shape[1], axis=1)
        return jax.make_array_from_callback(
            target.shape, target.sharding, lambda index: copied[index]
        )

    return {
        path: place(getattr(scales, path[-1]), own)
        for path, own in declared.items()
        if own.source is None
    }


def _shape_of(config: ModelConfig) -> dict[str, Any]:
    return {
        name: getattr(config, name)
        for name in ("architecture", "num_layers", "num_kv_heads", "head_dim")
    }
