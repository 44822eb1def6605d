"""Load the parameters of a model folder onto the mesh: the entry point of this package."""

import math
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.traversals import unflatten_mapping

from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.gguf.folder import GGUF_FILE
from sgl_jax.checkpoint.hf_loading import Declared, in_layout, load_safetensors
from sgl_jax.checkpoint.kv_scales import place_kv_scales, read_kv_scales, stored_kv_scales
from sgl_jax.checkpoint.orbax_format import PARAMS_FOLDER, load_orbax
from sgl_jax.core.progress import Progress
from sgl_jax.layers.layer_weights import separate_matrices
from sgl_jax.layers.parameter import Declaration, ParamTree
from sgl_jax.layers.parameter import Path as ParamPath
from sgl_jax.models.eagle3 import SPARE_TENSORS
from sgl_jax.models.placement import PlacedModel

_DUMMY_VALUE = 2.0  # standard deviation of quantized dummies: few values exceed int4's 7
LOAD_FORMATS = ("safetensors", "orbax", "gguf", "dummy")


def load_params(
    placed: PlacedModel,
    model_path: str | Path,
    load_format: str,
    *,
    seed: int = 0,
    kv_cache_scales: str | Path | None = None,
    draft_model_path: str | Path | None = None,
    check_all_weights: bool = False,
    progress: Progress | None = None,
) -> ParamTree:
    """Load the parameters of `model_path` into the shapes and shardings that `placed` declares.

    Args:
        placed: the model, declared for a mesh.
        model_path: model folder; not read if `load_format` is "dummy".
        load_format: one of `LOAD_FORMATS`; see `detect_format`.
        seed: seed of dummy weights.
        kv_cache_scales: file with scales of an 8-bit KV cache (see `kv_scales`); only for a model
            placed with `has_kv_scales`. None: such a model uses its checkpoint's scales.
        draft_model_path: folder of the safetensors of an EAGLE-3 head, for a model with such a
            head.
        check_all_weights: check all weights for NaNs, not a sample (see `checkpoint.finite`).
        progress: gets the phase "loading".

    Returns:
        Nested dictionaries of arrays. If `placed.separates_layers`, the matrices of layers are
        tuples of arrays, one per layer (see `layers.layer_weights`).

    Raises:
        CheckpointError: the folder's weights, or the scales, do not fit the model.
        ValueError: `load_format` is unknown.
    """
    if load_format not in LOAD_FORMATS:
        known = ", ".join(LOAD_FORMATS)
        raise ValueError(f"load_format must be one of {known}, got {load_format!r}")
    config = placed.model.config
    # Read before the weights, since it is quick and may fail.
    folder, progress = Path(model_path), progress or Progress()
    kv_scales = None
    if kv_cache_scales is not None:
        kv_scales = read_kv_scales(Path(kv_cache_scales), config)
    elif load_format != "dummy" and any(own.source is None for own in placed.declared.values()):
        kv_scales = stored_kv_scales(folder, config)
    sourced = {path: (own.array, own.source) for path, own in placed.declared.items() if own.source}
    head_params: dict[ParamPath, jax.Array] = {}
    if config.eagle3 is not None and load_format != "dummy":
        assert draft_model_path is not None
        of_head = {path: sourced.pop(path) for path in list(sourced) if path[0] == "draft_layer"}
        head_params = _load_head(
            *(Path(draft_model_path), of_head, config.vocab_size, progress),
            check_all=check_all_weights,
        )
    if load_format == "dummy":
        params = _dummy_params(placed.declared, config.initializer_range, seed, progress)
    elif load_format == "orbax":
        params = load_orbax(folder, sourced, progress, check_all=check_all_weights)
    else:
        if load_format == "gguf" and detect_format(folder) != "gguf":
            raise CheckpointError(f"{str(folder)!r} is not a folder of a GGUF file")
        spare = placed.model.is_spare
        params = load_safetensors(
            *(folder, sourced, spare, progress, config.quantization), check_all=check_all_weights
        )
    params |= head_params
    if kv_scales is not None:
        params |= place_kv_scales(kv_scales, placed.declared)
    for path in params:  # one at a time
        params[path] = in_layout(params[path], placed.declared[path].array)
    tree: ParamTree = unflatten_mapping(params)
    if placed.separates_layers:
        separate_matrices(tree["layers"])
    return tree


def detect_format(folder: Path) -> str:
    """Return the format of the weights in a model folder. Raise CheckpointError without weights."""
    if any(folder.glob("orbax_params*")):
        return "orbax"
    if any(folder.glob("*.safetensors")):
        return "safetensors"
    if (folder / GGUF_FILE).is_file():
        return "gguf"
    raise CheckpointError(
        f"{str(folder)!r} holds neither *.safetensors nor {PARAMS_FOLDER}; for random weights "
        f"set load_format to 'dummy'"
    )


def _load_head(
    folder: Path, declared: Declared, vocab_size: int, progress: Progress, *, check_all: bool
) -> dict[ParamPath, jax.Array]:
    """Load an EAGLE-3 head. Raise CheckpointError, also if its logits are for unknown tokens."""
    is_spare = SPARE_TENSORS.__contains__
    params = load_safetensors(folder, declared, is_spare, progress, check_all=check_all)
    offsets = params.get(("draft_layer", "offsets"))
    if offsets is not None:
        tokens = np.asarray(offsets) + np.arange(len(offsets))
        if not (tokens[0] >= 0 and (np.diff(tokens) > 0).all() and tokens[-1] < vocab_size):
            raise CheckpointError(
                f"d2t in {str(folder)!r}, plus the number of each column, must be ascending tokens "
                f"in [0, {vocab_size})"
            )
    return params


def _dummy_params(
    declared: Mapping[ParamPath, Declaration],
    initializer_range: float,
    seed: int,
    progress: Progress,
) -> dict[ParamPath, jax.Array]:
    """Create random weights of standard deviation `initializer_range`; norms multiply by 1.

    Quantized weights have normal values, and scales that make their numbers about as large. They
    depend on the seed and each parameter's name and shape, not on the mesh. Each chip computes its
    part.
    """
    params: dict[ParamPath, jax.Array] = {}
    total = sum(own.array.size * own.array.dtype.itemsize for own in declared.values())
    with progress.phase("loading", total, "bytes") as phase:
        for path, own in declared.items():
            array = own.array
            if own.initial == "order":
                params[path] = jnp.broadcast_to(jnp.arange(array.shape[-1]), array.shape)
                params[path] = jax.device_put(params[path].astype(array.dtype), array.sharding)
            elif own.initial not in ("normal", "values"):
                value = _constant(own, initializer_range)
                params[path] = jnp.full(array.shape, value, array.dtype, device=array.sharding)
            else:
                name = zlib.crc32("/".join(path).encode())
                key = jax.random.fold_in(jax.random.key(seed), name)
                scale = initializer_range if own.initial == "normal" else _DUMMY_VALUE
                params[path] = _normal(array)(key, jnp.float32(scale))
            phase.advance(params[path].nbytes)
    return params


def _constant(own: Declaration, initializer_range: float) -> float:
    """Return a constant parameter's value: factors are 1, offsets 0, scales fit dummy values."""
    if own.initial != "scales":
        return 1 if own.initial == "ones" else 0
    scale = initializer_range / _DUMMY_VALUE
    is_exponent = own.array.dtype == jnp.uint8
    return 127 + round(math.log2(scale)) if is_exponent else scale


def _normal(array: jax.ShapeDtypeStruct) -> jax.stages.Wrapped:
    @partial(jax.jit, out_shardings=array.sharding)
    def make(key: jax.Array, scale: jax.Array) -> jax.Array:
        values = scale * jax.random.normal(key, array.shape, jnp.float32)
        if jnp.issubdtype(array.dtype, jnp.integer):
            values = jnp.clip(jnp.round(values), -7, 7)  # the range of int4
        return values.astype(array.dtype)

    return make
