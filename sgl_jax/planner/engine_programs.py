"""The programs of an engine that does not run: traced from shapes, for any mesh."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.devices import platform_of
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.executor.programs import Programs
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import PlacedModel, place_model


class EngineProgramsOnPaper(NamedTuple):
    """An engine's programs, and the arrays they would take."""

    config: EngineConfig
    placed: PlacedModel
    state: Any  # jax.ShapeDtypeStruct
    programs: Programs


def engine_programs(
    args: ServerArgs, model: ModelConfig, mesh: Mesh, pool_pages: tuple[int, ...]
) -> EngineProgramsOnPaper:
    """The programs `ModelExecutor` would make on `mesh`, with pools of so many pages on each rank,
    the null pages included. Raises ValueError as it does.
    """
    config = EngineConfig.resolve(args, model, platform_of(mesh))
    placed = place_model(model, mesh, config.build_options)
    state, row_params = config.state_shapes(pool_pages, mesh)
    sizes = config.sizes(pool_pages)
    programs = Programs(placed.graphdef, placed.params, state, row_params, sizes, mesh)
    return EngineProgramsOnPaper(config, placed, state, programs)


def bytes_per_device(tree: Any) -> int:
    """Bytes of each device's part of a tree of `jax.ShapeDtypeStruct` with shardings, unpadded."""
    bits: int = sum(
        num_bits(leaf.dtype) * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )
    return bits // 8


def num_bits(dtype: jnp.dtype) -> int:
    """Bits of a number in a TPU's memory; numpy has numbers of 4 bits in a byte each."""
    return 4 if dtype == jnp.int4 else 8 * int(dtype.itemsize)
