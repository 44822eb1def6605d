"""Orbax checkpoints of a model, with parameters stacked and fused like in the step.

A checkpoint is independent of the mesh (its vocabulary is not padded, its KV heads are not copied),
so any mesh can read it. Each chip reads only its part of most parameters. The few parameters that
the mesh pads or copies are read whole and changed on the device (`Source.fit`).
"""

import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.checkpoint.errors import CheckpointError, check_shapes
from sgl_jax.checkpoint.finite import non_finite_parameters
from sgl_jax.checkpoint.hf_loading import Declared
from sgl_jax.core.progress import Progress
from sgl_jax.layers.parameter import ParamTree
from sgl_jax.layers.parameter import Path as ParamPath
from sgl_jax.layers.sources import Placed, Source

# 2 is the format's version: it has one stack for each position in the period of unlike layers.
PARAMS_FOLDER = "orbax_params_2"
_WIDENED = jnp.dtype(jnp.int8), jnp.dtype(jnp.int4)
_CAST = {jnp.dtype(own) for own in (jnp.float32, jnp.float16, jnp.bfloat16)}


def save_orbax(folder: Path, params: ParamTree) -> None:
    """Write `params`, loaded for one chip, to a new folder below `folder`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / PARAMS_FOLDER, params)


def load_orbax(
    folder: Path, declared: Declared, progress: Progress, *, check_all: bool = False
) -> dict[ParamPath, jax.Array]:
    """Read parameters into their shardings, cast to their dtypes.

    `check_all` checks every value for NaNs and infinities, not a sample (see `finite`). `progress`
    gets the phase "loading": orbax reads all bytes in one call.

    Raises:
        CheckpointError: parameters are missing, unexpected or of a wrong shape, or one holds NaNs
            or infinities; names them.
    """
    path = (folder / PARAMS_FOLDER).absolute()
    if not path.is_dir():
        raise CheckpointError(
            f"no {PARAMS_FOLDER} folder in {str(folder)!r}: a checkpoint of an earlier version (in "
            "orbax_params) must be converted again, by python -m sgl_jax.checkpoint.convert"
        )
    with ocp.StandardCheckpointer() as checkpointer:
        wanted = {"/".join(name): source.plain_shape for name, (_, source) in declared.items()}
        stored = _stored_arrays(checkpointer, path)
        found = {name: tuple(own.shape) for name, own in stored.items()}
        check_shapes(repr(str(folder)), wanted, found)
        for name, (array, _) in declared.items():
            _check_type(path, "/".join(name), array.dtype, stored["/".join(name)].dtype)
        targets = {name: _as_stored(*own) for name, own in declared.items()}
        total = sum(array.size * array.dtype.itemsize for array in targets.values())
        with progress.phase("loading", total, "bytes") as phase:
            restored = flatten_mapping(checkpointer.restore(path, unflatten_mapping(targets)))
            phase.advance(total)
            non_finite = non_finite_parameters(restored, check_all=check_all)
    for name in non_finite:
        raise CheckpointError(
            f"parameter {'/'.join(name)} in {str(path)!r} holds values that are no finite numbers"
        )
    return {name: _fit(restored[name], *own) for name, own in declared.items()}


def _stored_arrays(checkpointer: Any, path: Path) -> dict[str, Any]:
    try:
        return dict(flatten_mapping(checkpointer.metadata(path).item_metadata.tree, sep="/"))
    except (AttributeError, ValueError, FileNotFoundError) as error:
        raise CheckpointError(f"{str(path)!r} is not a readable orbax checkpoint") from error


def _check_type(path: Path, name: str, wanted: Any, stored: Any) -> None:
    """Raise CheckpointError if the stored dtype cannot be converted to `wanted`.

    Floats may be cast to another float dtype, and int4 widened (`BuildOptions`), but quantized
    values belong to one scheme.
    """
    types = jnp.dtype(wanted), jnp.dtype(stored)
    if wanted != stored and not set(types) <= _CAST and types != _WIDENED:
        raise CheckpointError(
            f"parameter {name} in {str(path)!r} is {stored} instead of {wanted}: the checkpoint "
            "was converted with another --quantization"
        )


def _as_stored(target: jax.ShapeDtypeStruct, source: Source) -> jax.ShapeDtypeStruct:
    """Return the stored array in `target`'s sharding, or replicated if the mesh changes it.

    Placed experts are too large to replicate: they use `target`'s sharding if it divides them.
    """
    if source.is_plain:
        return target
    sharding = NamedSharding(target.sharding.mesh, P())
    if isinstance(source, Placed):
        with contextlib.suppress(ValueError):
            target.sharding.shard_shape(source.plain_shape)
            sharding = target.sharding
    return jax.ShapeDtypeStruct(source.plain_shape, target.dtype, sharding=sharding)


def _fit(array: jax.Array, target: jax.ShapeDtypeStruct, source: Source) -> jax.Array:
    if source.is_plain:
        return array
    fitted: jax.Array = jax.jit(source.fit, out_shardings=target.sharding)(array)
    return fitted
