"""The tensors of a checkpoint, and the parts of its quantized matrices."""

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from sgl_jax.checkpoint.stored.at_load import AtLoadReader
from sgl_jax.checkpoint.stored.mxfp4 import Mxfp4Reader
from sgl_jax.checkpoint.stored.packed import PackedReader
from sgl_jax.checkpoint.stored.plain import PlainReader
from sgl_jax.checkpoint.stored.reader import FLOATS, Expected, Files, Reader
from sgl_jax.layers.sources import swapped
from sgl_jax.layers.tensor_keys import Index, Shape, TensorKey
from sgl_jax.models.quantization import Packing, QuantizationConfig, Rule

_READERS: Mapping[Packing, Callable[[Rule], Reader]] = {
    "float": AtLoadReader,
    "plain": PlainReader,
    "compressed": PackedReader,
    "awq": PackedReader,
    "gptq": PackedReader,
    "mxfp4": Mxfp4Reader,
}
_INTEGERS = frozenset({"I64", "I32"})
# Tensors of a quantized matrix's module that files may hold, though no part needs them. The groups
# of inputs are stored even if inputs of a group are adjacent.
_SPARE: Mapping[Packing, frozenset[str]] = {
    "plain": frozenset({"input_scale", "activation_scale"}),
    "compressed": frozenset({"weight_shape", "weight_g_idx"}),
    "gptq": frozenset({"g_idx"}),
}


class QuantizedTensors:
    """Finds and reads tensors, and parts of quantized matrices."""

    def __init__(self, config: QuantizationConfig | None) -> None:
        """Set the checkpoint's config, or the config with the schemes for its floats."""
        self._config = config
        self._readers: dict[Rule, Reader] = {}

    def expected(
        self, key: TensorKey, shape: Shape, *, is_integer: bool = False
    ) -> Mapping[str, Expected]:
        """Return the tensors in files that make `key`, of shape `shape`, by name.

        With `is_integer`, a tensor has integers.
        """
        if key.part is None:
            return {key.name: Expected((shape,), _INTEGERS if is_integer else FLOATS)}
        found = self._reader(key.name).tensors(key.name, key.part, shape)
        if not key.part.by_input:
            return found
        return {
            name: own._replace(shapes=tuple(map(_exchanged, own.shapes)))
            for name, own in found.items()
        }

    def read(self, files: Files, key: TensorKey, index: Index) -> NDArray[Any]:
        """Read the slice `index` of a tensor or part. Raise ValueError for unfit contents."""
        if key.part is None:
            return files.read(key.name, index)
        if key.part.by_input:
            files = _FilesByInput(files)
        return self._reader(key.name).read(files, key.name, key.part, index)

    def is_spare(self, name: str) -> bool:
        """Return True for a tensor that a quantized checkpoint may hold but no part needs."""
        if self._config is None:
            return False
        module, _, own = name.rpartition(".")
        if self._config.has_kv_scales and own in ("k_scale", "v_scale"):
            return True
        rule = self._config.rule_of(module)
        spare = tuple(_SPARE.get(rule.stored.packing, ())) if rule else ()
        return own.endswith(spare)  # of all experts' matrices: "down_proj_activation_scale"

    def is_zero_bias(self, files: Files, name: str) -> bool:
        """Return True for a packed matrix's bias of zeros, which some AutoGPTQ versions write."""
        module, _, own = name.rpartition(".")
        rule = None if self._config is None else self._config.rule_of(module)
        is_gptq = rule is not None and rule.stored.packing == "gptq"
        return is_gptq and own == "bias" and not files.read(name, ()).any()

    def _reader(self, weight: str) -> Reader:
        assert self._config is not None
        rule = self._config.rule_of(weight.removesuffix(".weight"))
        assert rule is not None, f"{weight} is not quantized"
        if rule not in self._readers:
            self._readers[rule] = _READERS[rule.stored.packing](rule)
        return self._readers[rule]


class _FilesByInput(Files):
    """The tensors of all experts' matrices [experts, in, out], read as [experts, out, in]."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def read(self, name: str, index: Index) -> NDArray[Any]:
        part = self._files.read(name, _exchanged(index))
        return part.swapaxes(1, 2) if part.ndim > 2 else part


def _exchanged(axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Exchange axes 1 and 2; scales of whole matrices have no axis 2."""
    return swapped(axes) if len(axes) > 2 else axes
