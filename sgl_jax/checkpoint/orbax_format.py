"""The model as an orbax checkpoint: parameters stacked and fused as the step uses them.

Written for no mesh in particular (vocabulary not padded, KV heads not copied), so it can be read
on any: each chip reads its own part of most parameters, and the few that a mesh pads or copies
are read whole and changed on the device.
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.finite import non_finite_parameters
from sgl_jax.checkpoint.paths import Path as ParamPath
from sgl_jax.checkpoint.paths import flatten, unflatten
from sgl_jax.layers.parameter import ParamTree

PARAMS_FOLDER = "orbax_params"


def save_orbax(folder: Path, params: ParamTree) -> None:
    """Write `params`, as built for one chip, into a new folder below `folder`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / PARAMS_FOLDER, params)


def load_orbax(
    folder: Path,
    stored: ParamTree,
    wanted: ParamTree,
    shardings: ParamTree,
    kv_heads: tuple[int, int],
    *,
    check_all: bool = False,
) -> ParamTree:
    """Read parameters into `shardings`, cast to the types in `wanted`.

    Args:
        folder: model folder.
        stored: shapes of the model built for one chip, which is how it was saved.
        wanted: shapes of the model built for the mesh.
        shardings: `NamedSharding`s of the same tree.
        kv_heads: how many KV heads the stored model has, and their size.
        check_all: look for values that are no finite numbers everywhere, see `finite`.

    Raises:
        CheckpointError: naming every parameter that is missing, unexpected or of a wrong shape,
            or one that holds other values than finite numbers.
    """
    path = (folder / PARAMS_FOLDER).absolute()
    if not path.is_dir():
        raise CheckpointError(f"no {PARAMS_FOLDER} folder in {str(folder)!r}")
    stored_flat, wanted_flat, placed = flatten(stored), flatten(wanted), flatten(shardings)
    with ocp.StandardCheckpointer() as checkpointer:
        _check_parameters(stored_flat, flatten(_metadata(checkpointer, path)), folder)
        targets = {}
        for name, shape in stored_flat.items():
            fits = shape.shape == wanted_flat[name].shape
            sharding = placed[name] if fits else NamedSharding(placed[name].mesh, P())
            targets[name] = jax.ShapeDtypeStruct(
                shape.shape, wanted_flat[name].dtype, sharding=sharding
            )
        tree = checkpointer.restore(path, unflatten(targets))
    for name in non_finite_parameters(tree, check_all=check_all):
        raise CheckpointError(
            f"parameter {'/'.join(name)} in {str(path)!r} holds values that are no finite numbers"
        )
    restored = flatten(tree)
    return unflatten(
        {
            name: _fit(name, array, wanted_flat[name].shape, placed[name], kv_heads)
            for name, array in restored.items()
        }
    )


def _fit(
    name: ParamPath,
    array: jax.Array,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    kv_heads: tuple[int, int],
) -> jax.Array:
    """Pad the vocabulary or copy KV heads, as the mesh asks, where `array` is not of `shape`."""
    if array.shape == shape:
        return array
    change = partial(_copy_kv_heads, kv_heads) if name[-1] in ("qkv", "qkv_bias") else _pad
    fitted: jax.Array = jax.jit(change, static_argnums=1, out_shardings=sharding)(array, shape)
    return fitted


def _pad(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(array, [(0, b - a) for a, b in zip(array.shape, shape, strict=True)])


def _copy_kv_heads(stored: tuple[int, int], array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A weight or bias of `layers.attention` for more KV heads with smaller groups.

    `stored` is how many KV heads `array` has, and their size.
    """
    num_stored, head_dim = stored
    inputs = array.shape[:2] if array.ndim == 3 else array.shape[:1]  # layers, and hidden
    num_added = (math.prod(shape) - array.size) // math.prod(inputs) // (2 * head_dim)
    num_wanted = num_stored + num_added
    grouped = array.reshape(*inputs, num_stored, -1, head_dim)
    q, kv = grouped[..., :-2, :], grouped[..., -2:, :]
    q = q.reshape(*inputs, num_wanted, -1, head_dim)
    kv = jnp.repeat(kv, num_wanted // num_stored, axis=-3)
    return jnp.concatenate([q, kv], axis=-2).reshape(shape)


def _metadata(checkpointer: Any, path: Path) -> ParamTree:
    try:
        metadata = checkpointer.metadata(path).item_metadata.tree
    except (AttributeError, ValueError, FileNotFoundError) as error:
        raise CheckpointError(f"{str(path)!r} is not a readable orbax checkpoint") from error
    return dict(metadata)


def _check_parameters(
    expected: Mapping[ParamPath, Any], found: Mapping[ParamPath, Any], folder: Path
) -> None:
    problems = [f"{'/'.join(name)} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{'/'.join(name)} is unexpected" for name in found.keys() - expected.keys()]
    problems += [
        f"{'/'.join(name)} has shape {list(found[name].shape)}, config.json asks for "
        f"{list(expected[name].shape)}"
        for name in expected.keys() & found.keys()
        if tuple(found[name].shape) != tuple(expected[name].shape)
    ]
    if problems:
        listing = "\n  ".join(sorted(problems))
        raise CheckpointError(f"{len(problems)} problems in {str(folder)!r}:\n  {listing}")
