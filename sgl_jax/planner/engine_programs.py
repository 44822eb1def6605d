"""The programs of an engine that does not run: traced from shapes, for any mesh."""

from typing import Any, NamedTuple

from jax.sharding import Mesh

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.devices import platform_of
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.executor.programs import Programs
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import PlacedModel, place_model


class EngineProgramsOnPaper(NamedTuple):
    """An engine's programs and the arrays they would take."""

    config: EngineConfig
    placed: PlacedModel
    state: Any  # jax.ShapeDtypeStruct
    programs: Programs


def engine_programs(
    args: ServerArgs, model: ModelConfig, mesh: Mesh, pool_pages: tuple[int, ...]
) -> EngineProgramsOnPaper:
    """Return the programs of a `ModelExecutor` on `mesh`, with `pool_pages` on each rank (null
    pages included). Raises ValueError if the engine would reject its settings."""
    config = EngineConfig.resolve(args, model, platform_of(mesh))
    placed = place_model(model, mesh, config.build_options)
    state, row_params = config.state_shapes(pool_pages, mesh)
    sizes = config.sizes(pool_pages)
    programs = Programs(
        *(placed.graphdef, placed.params, state, row_params, sizes, mesh),
        row_blocks=config.row_blocks,
    )
    return EngineProgramsOnPaper(config, placed, state, programs)
