"""Hugging Face safetensors straight into sharded arrays, one chip's part at a time."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.finite import non_finite_parameters, non_finite_tensor
from sgl_jax.checkpoint.hf_layout import is_ignored, parameter_sources
from sgl_jax.checkpoint.paths import flatten, unflatten
from sgl_jax.checkpoint.sources import Source
from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.layers.parameter import ParamTree
from sgl_jax.models.config import ModelConfig


def load_safetensors(
    folder: Path,
    config: ModelConfig,
    shapes: ParamTree,
    shardings: ParamTree,
    num_kv_heads: int,
    *,
    check_all: bool = False,
) -> ParamTree:
    """Read the parameters declared by `shapes` into `shardings`, cast to the declared types.

    `check_all`: look for values that are no finite numbers everywhere, see `finite`.
    Host memory holds one parameter's part for one chip, and one tensor's slice, at a time.

    Raises:
        CheckpointError: naming every tensor that is missing, unexpected or of a wrong shape, or
            one that holds other values than finite numbers.
    """
    declared, placed = flatten(shapes), flatten(shardings)
    sources = parameter_sources(config, declared, num_kv_heads)
    with TensorFiles(folder) as files:
        _check_tensors(sources.values(), files, config, folder)
        params = unflatten(
            {path: _load(sources[path], declared[path], placed[path], files) for path in declared}
        )
        for path in non_finite_parameters(params, check_all=check_all):
            where = non_finite_tensor(sources[path], files)
            what = f"{where} holds" if where else f"as {declared[path].dtype}, {path} would hold"
            raise CheckpointError(f"{what} values that are no finite numbers")
        return params


def _load(
    source: Source, declared: jax.ShapeDtypeStruct, sharding: Sharding, files: TensorFiles
) -> jax.Array:
    parts: dict[tuple[tuple[int, int], ...], NDArray[Any]] = {}

    def read_part(index: tuple[slice, ...] | None) -> NDArray[Any]:
        """One chip's part; chips that hold the same part share the read."""
        bounds = tuple(
            part.indices(size)[:2] for part, size in zip(index or (), declared.shape, strict=True)
        )
        if bounds not in parts:
            out = np.empty([stop - start for start, stop in bounds], declared.dtype)
            source.fill(out, tuple(slice(*bound) for bound in bounds), files)
            parts[bounds] = out
        return parts[bounds]

    return jax.make_array_from_callback(declared.shape, sharding, read_part)


def _check_tensors(sources: Any, files: TensorFiles, config: ModelConfig, folder: Path) -> None:
    expected = {name: shape for source in sources for name, shape in source.tensors().items()}
    found = files.shapes
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [
        f"{name} is not part of {config.architecture}"
        for name in found
        if name not in expected and not is_ignored(name, config)
    ]
    problems += [
        f"{name} has shape {list(found[name])}, config.json asks for {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        listing = "\n  ".join(sorted(problems))
        raise CheckpointError(f"{len(problems)} problems in {str(folder)!r}:\n  {listing}")
