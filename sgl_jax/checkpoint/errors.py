"""What can be wrong with a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from sgl_jax.layers.sources import Shape


class CheckpointError(ValueError):
    """A model folder whose weights are missing, unreadable, or not those of its config."""


def check_shapes(folder: Path, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """Raise CheckpointError, naming all that is missing, unexpected, or of a wrong shape."""
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{name} is unexpected" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} has shape {list(found[name])}, config.json asks for {list(expected[name])}"
        for name in expected.keys() & found.keys()
        if found[name] != expected[name]
    ]
    if problems:
        listing = "\n  ".join(sorted(problems))
        raise CheckpointError(f"{len(problems)} problems in {str(folder)!r}:\n  {listing}")
