"""Parameters of a model from tensors that arrive in any order, such as a trainer's.

The same sources as of files say which tensors make a parameter. As soon as all tensors of a
parameter have arrived it can be made, and tensors that no other parameter needs are dropped.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
from numpy.typing import NDArray

from sgl_jax.checkpoint.array_tensors import ArrayTensors, RowPieces, type_of
from sgl_jax.checkpoint.errors import CheckpointError, check_tensors
from sgl_jax.checkpoint.hf_loading import (
    Declared,
    StoredTensors,
    are_in,
    as_stored,
    expected_tensors,
    load_parameter,
)
from sgl_jax.checkpoint.stored.reader import Expected
from sgl_jax.checkpoint.stored.tensors import QuantizedTensors
from sgl_jax.layers.layer_weights import is_separated, shape_of_layer
from sgl_jax.layers.parameter import Path
from sgl_jax.layers.sources import Derived, Source
from sgl_jax.layers.tensor_keys import Index, Shape, Tensors
from sgl_jax.models.placement import PlacedModel

# A parameter's array, or the arrays of its layers (`layers.layer_weights`).
Leaf: TypeAlias = jax.Array | tuple[jax.Array, ...]
_WHERE = "the update"


@dataclass(frozen=True)
class _OneLayer(Derived):
    """One entry of the first axis of a part."""

    layer: int

    @property
    def shape(self) -> Shape:
        return self.part.shape[1:]

    def _within(self, index: Index) -> Index:
        return slice(self.layer, self.layer + 1), *index

    def stored(self, index: Index, tensors: Tensors, prefix: str = "") -> NDArray[Any] | None:
        own = self.part.stored(self._within(index), tensors, prefix)
        return None if own is None else own[0]

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        self.part.fill(out[None], self._within(index), tensors, prefix)


class ArrivingWeights:
    """The parameters that are left to make, and the tensors that have arrived for them.

    The tensors of a draft layer are optional, unless its arrays were deleted: without any of them
    the layer keeps its weights.
    """

    def __init__(self, placed: PlacedModel, *, check_all: bool, needs_drafts: bool = False) -> None:
        """Await the tensors of `placed`, with `needs_drafts` also those of its draft layer.
        `check_all`: see `ArrayTensors`."""
        self._placed = placed
        self._needs_drafts = needs_drafts
        self._stored = QuantizedTensors(placed.model.config.quantization)
        self._tensors = ArrayTensors(check_all=check_all)
        self._pieces = RowPieces()
        self._left = {
            path: (own.array, own.source)
            for path, own in placed.declared.items()
            if own.source is not None
        }
        self._expected: dict[str, Expected] = {}
        self._names: dict[Path, set[str]] = {path: set() for path in self._left}
        for form in self._forms():
            for path, own in form.items():
                for name, wanted in self._needs({path: own}).items():
                    if name in self._expected:
                        shapes = dict.fromkeys((*self._expected[name].shapes, *wanted.shapes))
                        wanted = wanted._replace(shapes=tuple(shapes))
                    self._expected[name] = wanted
                    self._names[path].add(name)
        self._users = Counter(name for names in self._names.values() for name in names)
        others = (names for path, names in self._names.items() if path[0] != "draft_layer")
        self._of_drafts = self._expected.keys() - set[str]().union(*others)
        self._arrived: set[str] = set()

    def _forms(self) -> Iterator[Declared]:
        """Yield the parameters in all forms that a checkpoint may have them in."""
        seen: set[tuple[str, tuple[Shape, ...]]] = set()

        def is_new(wanted: Mapping[str, Expected]) -> bool:
            return all((name, own.shapes) not in seen for name, own in wanted.items())

        while True:
            form = as_stored(self._left, self._stored, is_new)
            found = {(name, own.shapes) for name, own in self._needs(form).items()}
            if found <= seen:
                return
            yield form
            seen |= found

    @property
    def expected_shapes(self) -> dict[str, Shape]:
        """Return the names and shapes of tensors that make all parameters that are left: those of
        one form each, and the first shape of several."""
        form = next(self._forms())
        return {name: own.shapes[0] for name, own in self._needs(form).items()}

    def add(self, tensors: Mapping[str, Any]) -> None:
        """Take tensors: numpy or jax arrays, `Transposed` or `Flat`, or `RowPieces` in numpy.

        Raises:
            CheckpointError: a tensor is unknown, came before, or has a wrong shape or dtype.
        """
        needed = {key: own for key, own in tensors.items() if not self._is_spare(key)}
        tensors = self._pieces.joined(needed, self._num_rows)
        for name in tensors.keys() & self._arrived:
            raise CheckpointError(f"tensor {name!r} arrived twice in one update")
        found = {name: (tuple(own.shape), type_of(own)) for name, own in tensors.items()}
        known = {name: self._expected[name] for name in found.keys() & self._expected.keys()}
        check_tensors(_WHERE, known, found)
        for name in found:
            self._tensors.add(name, tensors[name])
        self._arrived |= found.keys()

    def _is_spare(self, key: str) -> bool:
        """Return whether nothing needs a tensor, or a piece of one, that a checkpoint may have."""
        name = key.rpartition("#")[0] or key
        is_spare = self._placed.model.is_spare(name) or self._stored.is_spare(name)
        return is_spare and name not in self._expected

    def _num_rows(self, name: str) -> int:
        if name not in self._expected:
            raise CheckpointError(f"tensor {name!r}, of which a piece arrived, is unexpected")
        return self._expected[name].shapes[0][0]

    def ready(self) -> list[Path]:
        """Return the parameters whose tensors have all arrived, and which were not made yet."""
        arrived = self._tensors.shapes.keys()
        chosen = self._chosen()
        found = [path for path in chosen if self._needs({path: chosen[path]}).keys() <= arrived]
        self._left |= {path: chosen[path] for path in found}
        return found

    def _chosen(self) -> dict[Path, tuple[jax.ShapeDtypeStruct, Source]]:
        return as_stored(self._left, self._stored, partial(are_in, self._tensors.shapes))

    def _needs(self, declared: Declared) -> dict[str, Expected]:
        return expected_tensors(declared, self._stored)

    def make(self, path: Path, on_filled: Callable[[], object] = lambda: None) -> Leaf:
        """Make a ready parameter. `on_filled`: see `load_parameter`."""
        array, source = self._left.pop(path)
        tensors = StoredTensors(self._tensors, self._stored)
        leaf: Leaf
        if self._placed.separates_layers and is_separated(path, array.ndim):
            one = shape_of_layer(array)
            sources = (_OneLayer(source, layer) for layer in range(array.shape[0]))
            leaf = tuple(load_parameter(one, own, tensors, on_filled) for own in sources)
        else:
            leaf = load_parameter(array, source, tensors, on_filled)
        self._tensors.forget_copies()
        self._users.subtract(self._names[path])
        self._tensors.drop(name for name in self._names[path] if not self._users[name])
        return leaf

    def missing(self) -> set[str]:
        """Return the names of tensors that must still arrive: at first, all of the model."""
        wanted = self._needs(self._chosen()).keys() - self._arrived
        has_drafts = self._needs_drafts or bool(self._arrived & self._of_drafts)
        has_model = not self._arrived or bool(self._arrived - self._of_drafts)
        return {name for name in wanted if (has_drafts if name in self._of_drafts else has_model)}

    def check_complete(self) -> None:
        """Raise CheckpointError, with their names, if tensors are missing."""
        check_tensors(_WHERE, {name: self._expected[name] for name in self.missing()}, {})
