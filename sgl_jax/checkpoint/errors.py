"""The error of a checkpoint that cannot be loaded, and the checks of its tensors."""

from collections.abc import Mapping

from sgl_jax.checkpoint.stored.reader import Expected
from sgl_jax.layers.tensor_keys import Shape

_MAX_NAMED = 8  # problems in a message; with another model's config there are hundreds


class CheckpointError(ValueError):
    """A model folder with weights that are missing, unreadable, or do not fit its config."""


def check_tensors(
    where: str, expected: Mapping[str, Expected], found: Mapping[str, tuple[Shape, str]]
) -> None:
    """Raise CheckpointError for missing, unexpected and misshapen tensors, and for wrong dtypes.

    `found` has each tensor's shape and dtype. The message names the tensors, and `where` they are.
    """
    for name in expected.keys() & found.keys():
        allowed, stored = expected[name].types, found[name][1]
        if stored not in allowed:
            raise CheckpointError(
                f"tensor {name!r} has type {stored}; supported: {', '.join(sorted(allowed))}"
            )
    # A tensor may have one of several shapes: use its actual shape if allowed, or the first.
    shapes = {
        name: next((own for own in expected[name].shapes if own == found[name][0]), own.shapes[0])
        if name in found
        else own.shapes[0]
        for name, own in expected.items()
    }
    check_shapes(where, shapes, {name: shape for name, (shape, _) in found.items()})


def check_shapes(where: str, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """Raise CheckpointError, with their names, for missing, unexpected and misshapen tensors."""
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{name} is unexpected" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} has shape {list(found[name])} instead of {list(expected[name])}"
        for name in expected.keys() & found.keys()
        if found[name] != expected[name]
    ]
    if problems:
        named = sorted(problems)[:_MAX_NAMED]
        if len(problems) > len(named):
            named.append(f"and {len(problems) - len(named)} more")
        raise CheckpointError(
            f"{len(problems)} tensors in {where} do not match config.json: {'; '.join(named)}"
        )
