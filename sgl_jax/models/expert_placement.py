"""A placement of a mixture's experts over chips, with copies of the busiest, from counted loads.

The most loaded chip sets a layer's time. A copy of an expert takes an equal share of its tokens, so
copies of the most chosen experts, distributed with the rest, balance the chips. The algorithm is
greedy: copies go to the expert with the greatest load per copy, then the largest shares go first to
the chip with the least load (longest processing time first, Graham 1969, doi:10.1137/0117039).
DeepSeek's load balancer and SGLang list their experts in slots in the same way.

The loads are `{"logical_count": [layers][experts]}` in JSON, as returned by
`/dump_expert_distribution_record`: how often each layer's router chose each expert. Dense layers
have zeros.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.config import ModelConfig

Int64Array = NDArray[np.int64]
LOADS_KEY = "logical_count"
_LEAST_GAIN = 1e-3  # least gain of an exchange of experts, as a share of the greatest load


class ExpertPlacement(NamedTuple):
    """The expert in each slot of each layer; a chip has consecutive slots."""

    experts: tuple[tuple[int, ...], ...]  # [layers][slots]

    @property
    def num_slots(self) -> int:
        return len(self.experts[0])

    def of_layers(self, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(self.experts[layer] for layer in layers)

    def slots(self, layers: Sequence[int]) -> NDArray[np.int32]:
        """Return the slots of each expert's copies: int32 [layers, experts, copies], then -1."""
        of_layers = [_slots_of(self.experts[layer]) for layer in layers]
        most = max(len(slots) for layer in of_layers for slots in layer)
        table = np.full((len(of_layers), len(of_layers[0]), most), -1, np.int32)
        for own, layer in zip(table, of_layers, strict=True):
            for copies, slots in zip(own, layer, strict=True):
                copies[: len(slots)] = slots
        return table

    def imbalance(self, loads: Int64Array, num_chips: int) -> float:
        """Return the greatest over the mean chip's load, averaged over layers of `loads`.

        `loads` are [layers, experts]; layers of zeros are skipped.
        """
        return _mean_imbalance(map(chip_loads, self.experts, loads, [num_chips] * len(loads)))


def place_experts(loads: Int64Array, num_redundant: int, num_chips: int) -> ExpertPlacement:
    """Place all layers' experts by `loads` [layers, experts]; a layer of zeros counts as uniform.

    `num_chips` divides the sum of experts and `num_redundant` copies. Copies of an expert are on
    different chips unless there are more copies than chips. Equal loads give equal placements.
    """
    return ExpertPlacement(tuple(_place_layer(own, num_redundant, num_chips) for own in loads))


def unplaced_imbalance(loads: Int64Array, num_chips: int) -> float:
    """Return `ExpertPlacement.imbalance` with the experts in order and without copies."""
    in_order = range(loads.shape[1])
    size = -(-len(in_order) // num_chips)
    return _mean_imbalance(chip_loads([*in_order], own, num_chips, size) for own in loads)


def chip_loads(
    experts: Sequence[int], loads: Int64Array, num_chips: int, size: int | None = None
) -> NDArray[np.float64]:
    """Return the load of each chip, with `size` of the `experts` each; copies have equal shares."""
    size = size or len(experts) // num_chips
    shares = loads / np.maximum(np.bincount(experts, minlength=len(loads)), 1)
    totals = np.zeros(num_chips)
    np.add.at(totals, np.arange(len(experts)) // size, shares[list(experts)])
    return totals


def placement_for(args: ServerArgs, model: ModelConfig) -> ExpertPlacement | None:
    """Return the placement of `--init-expert-location` and `--ep-num-redundant-experts`, if any.

    Raises ValueError if chips cannot have equally many experts, or for a bad file.
    """
    if not args.places_experts or model.moe is None:
        return None
    experts, copies = model.moe.num_experts, args.ep_num_redundant_experts
    if (experts + copies) % args.ep_size:
        raise ValueError(
            f"--ep-num-redundant-experts {copies}: --ep-size {args.ep_size} must divide experts and"
            f" copies, which are {experts} + {copies}"
        )
    loads = loads_for(args, model)
    if loads is None:
        loads = np.ones((model.num_layers, experts), np.int64)
    return place_experts(loads, copies, args.ep_size)


def loads_for(args: ServerArgs, model: ModelConfig) -> Int64Array | None:
    """Return the loads [layers, experts] in `--init-expert-location`; None without a file.

    Raises ValueError, which names the file, if it has no loads, or another model's.
    """
    if args.init_expert_location == "trivial" or model.moe is None:
        return None
    file, shape = args.init_expert_location, (model.num_layers, model.moe.num_experts)
    try:
        loads = np.asarray(json.loads(Path(file).read_text())[LOADS_KEY])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"--init-expert-location {file!r} is no file of {{{LOADS_KEY!r}: [layers][experts]}}: "
            f"{error!r}"
        ) from error
    if loads.shape != shape or loads.dtype.kind != "i" or (loads < 0).any():
        raise ValueError(
            f"--init-expert-location {file!r} must hold counts of {shape[0]} layers x "
            f"{shape[1]} experts, got {loads.dtype} {list(loads.shape)}"
        )
    return loads.astype(np.int64)


def _slots_of(experts: Sequence[int]) -> list[list[int]]:
    slots: list[list[int]] = [[] for _ in range(max(experts) + 1)]
    for slot, expert in enumerate(experts):
        slots[expert].append(slot)
    return slots


def _mean_imbalance(chips: Iterable[NDArray[np.float64]]) -> float:
    found = [own.max() / own.mean() for own in chips if own.any()]
    return float(np.mean(found)) if found else 1.0


def _place_layer(loads: Int64Array, num_redundant: int, num_chips: int) -> tuple[int, ...]:
    weights = loads.astype(np.float64) if loads.any() else np.ones(len(loads))
    copies = _count_copies(weights, num_redundant, num_chips)
    shares = weights / copies
    chips = _Chips(shares, num_chips, int(copies.sum()) // num_chips)
    for expert in np.argsort(-shares, kind="stable"):
        for _ in range(copies[expert]):
            chips.put(int(expert))
    chips.level()
    return tuple(expert for own in chips.experts for expert in sorted(own))


def _count_copies(weights: NDArray[np.float64], num_redundant: int, num_chips: int) -> Int64Array:
    copies = np.ones(len(weights), np.int64)
    for _ in range(num_redundant):
        is_everywhere = copies >= num_chips
        shares = np.where(is_everywhere & ~is_everywhere.all(), -1.0, weights / copies)
        copies[np.argmax(shares)] += 1
    return copies


class _Chips:
    """Chips with up to `size` experts each."""

    def __init__(self, shares: NDArray[np.float64], num_chips: int, size: int) -> None:
        self.experts: list[list[int]] = [[] for _ in range(num_chips)]
        self._loads = np.zeros(num_chips)
        self._shares = shares
        self._size = size

    def put(self, expert: int) -> None:
        """Put a copy on the least loaded chip with a free slot and without another copy.

        If only chips with a copy have free slots, one of them first takes another expert from a
        full chip without a copy.
        """
        chips = range(len(self.experts))
        free = [chip for chip in chips if len(self.experts[chip]) < self._size]
        without = [chip for chip in chips if expert not in self.experts[chip]]
        both = [chip for chip in free if chip in without]
        if not both and without:
            moves = [
                (max(self._loads[full] - self._shares[other], self._loads[chip]), full, other, chip)
                for full in without
                for chip in free
                for other in self.experts[full]
                if other not in self.experts[chip]
            ]
            _, full, other, chip = min(moves)
            self._move(other, full, chip)
            both = [full]
        chip = min(both or free, key=lambda own: self._loads[own])
        self.experts[chip].append(expert)
        self._loads[chip] += self._shares[expert]

    def level(self) -> None:
        """Exchange experts with the most loaded chip while that lowers the greatest load."""
        for _ in range(len(self._shares)):
            most = int(np.argmax(self._loads))
            swaps = [
                (max(self._loads[most] - gain, self._loads[chip] + gain), one, other, chip)
                for chip in range(len(self.experts))
                if chip != most
                for one in self.experts[most]
                for other in self.experts[chip]
                if (gain := self._shares[one] - self._shares[other]) > 0
                and one not in self.experts[chip]
                and other not in self.experts[most]
            ]
            load, one, other, chip = min(swaps, default=(np.inf, 0, 0, 0))
            if load >= self._loads[most] * (1 - _LEAST_GAIN):
                return
            self._move(one, most, chip)
            self._move(other, chip, most)

    def _move(self, expert: int, source: int, target: int) -> None:
        self.experts[source].remove(expert)
        self.experts[target].append(expert)
        self._loads[source] -= self._shares[expert]
        self._loads[target] += self._shares[expert]
