"""A serving engine for language models on JAX, with a memory stack that audits itself.

Start with `docs/inside/life_of_a_request.md`; `sgl_jax.mem_cache` is the core.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from sgl_jax.core.sampling_params import SamplingParams
    from sgl_jax.engine.offline import Engine


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `import sgl_jax.mem_cache` never loads jax.
    if name == "Engine":
        from sgl_jax.engine.offline import Engine

        return Engine
    if name == "SamplingParams":
        from sgl_jax.core.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'sgl_jax' has no attribute {name!r}")
