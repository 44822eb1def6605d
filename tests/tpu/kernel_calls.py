"""The kernel calls of a recipe's steps: traced on paper, then compiled one by one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sgl_jax.executor import engine_config
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.layers.kernels import Kernels, calls_of, kernels_from, kernels_of
from sgl_jax.planner.engine_programs import engine_programs
from sgl_jax.planner.topology import Topology, topology_mesh
from tests.tpu.compiling import compile_on
from tests.tpu.recipes import Recipe

_FEW_PAGES = 64  # of a pool: kernels compile alike for any number


class KernelCall(NamedTuple):
    """A kernel and the arguments of one call: shapes for arrays, all else as it was."""

    name: str
    leaves: tuple[Any, ...]
    structure: Any  # of (args, kwargs)

    @classmethod
    def of(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "KernelCall":
        leaves, structure = jax.tree.flatten((args, kwargs))
        shapes = (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf
            for leaf in leaves
        )
        return cls(name, tuple(shapes), structure)

    @property
    def key(self) -> str:
        """Equal for calls that compile to the same program."""
        return f"{self.name} {self.leaves} {self.structure}"

    @property
    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        return [leaf for leaf in self.leaves if isinstance(leaf, jax.ShapeDtypeStruct)]

    @property
    def function(self) -> Callable[..., Any]:
        """The call as a function of its arrays alone."""
        call = calls_of(kernels_of("tpu", "pallas"))[self.name]

        def run(*arrays: jax.Array) -> Any:
            rest = iter(arrays)
            leaves = [
                next(rest) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
                for leaf in self.leaves
            ]
            args, kwargs = jax.tree.unflatten(self.structure, leaves)
            return call(*args, **kwargs)

        return run

    def compile_for(self, mesh: Mesh) -> float:
        """Compile for the mesh's chip, and return the seconds of work."""
        return compile_on(mesh, self.function, *self.arrays)[1]


class Recorder:
    """Stands in for the kernels of a model, and notes their calls."""

    def __init__(self) -> None:
        self.calls: dict[str, KernelCall] = {}
        self._results: dict[str, Any] = {}

    @property
    def kernels(self) -> Kernels:
        names = calls_of(kernels_of("tpu", "pallas"))
        return kernels_from({name: self._noting(name) for name in names})

    def _noting(self, name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = KernelCall.of(name, args, kwargs)
            if call.key not in self._results:
                self.calls[call.key] = call
                self._results[call.key] = jax.eval_shape(call.function, *call.arrays)
            found = self._results[call.key]
            return jax.tree.map(lambda own: jnp.zeros(own.shape, own.dtype), found)

        return run


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Trace engines with a recorder in place of the kernels."""
    recorder = Recorder()
    with mock.patch.object(engine_config, "kernels_of", return_value=recorder.kernels):
        yield recorder


def calls_of_recipe(recipe: Recipe) -> dict[str, KernelCall]:
    """The calls of the two shapes that serve every step, by their keys."""
    mesh = topology_mesh(Topology.parse(recipe.topology), recipe.dp, recipe.tp)
    with recorded() as recorder:
        pools = EngineConfig.resolve(recipe.args, recipe.config, "tpu").pools
        pages = tuple(num + 1 for num in pools.pages(_FEW_PAGES))
        engine = engine_programs(recipe.args, recipe.config, mesh, pages)
        for bucket in engine.config.buckets.first:
            engine.programs.lower_step(bucket)
    return recorder.calls
