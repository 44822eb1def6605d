"""Read the needs of a compiled TPU program: memory, collectives, and the compiler's estimate.

The scheduled HLO has `estimated_cycles` on most fusions, but not on Pallas kernels and collectives.
Work of a SparseCore in parallel to the program, such as a tpu7x's collectives, adds no cycles. The
body of a loop is multiplied by its trip count, if the compiler provides it. In a conditional, only
the branch that exchanges the fewest bytes counts, and among equals the one with the fewest cycles:
in an engine's step, this is the branch of plain greedy rows.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import jax

COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("collective-permute", "collective-broadcast", "ragged-all-to-all"),
)
# Starts an exchange that continues during the fusions after it.
_ASYNC_START = 'custom_call_target="AsyncCollectiveStart"'
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One kind of exchange between devices, of one shape."""

    kind: str
    shape: str  # result on one device, in HLO's notation
    num_bytes: int  # bytes of that result
    group_size: int  # participating devices
    times: int  # per step
    in_loop: bool  # True if it runs once per layer
    # The program's cycles during the exchange; 0 if the program waits for it at once. Cycles during
    # several exchanges count for the first one started.
    beside_cycles: int = 0


class ProgramCost(NamedTuple):
    """The needs of one program on one device; all sizes in bytes."""

    argument_bytes: int
    temp_bytes: int
    alias_bytes: int  # arguments updated in place
    output_bytes: int
    code_bytes: int
    estimated_cycles: int
    collectives: tuple[Collective, ...]
    kernels: tuple[str, ...]  # distinct Pallas calls

    @property
    def resident_bytes(self) -> int:
        """Return the maximum memory of a device while the program runs."""
        fresh = self.output_bytes - self.alias_bytes
        return self.argument_bytes + self.temp_bytes + fresh + self.code_bytes


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    text: str


def program_cost(compiled: jax.stages.Compiled) -> ProgramCost:
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    assert memory is not None
    assert text is not None
    computations = _computations(text)
    cycles, collectives = _Walk(computations).visit("ENTRY", in_loop=False)
    return ProgramCost(
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        estimated_cycles=cycles,
        collectives=tuple(one._replace(times=count) for one, count in sorted(collectives.items())),
        kernels=tuple(
            re.sub(r"\.\d+$", "", instruction.name)
            for instructions in computations.values()
            for instruction in instructions
            if 'custom_call_target="tpu_custom_call"' in instruction.text
        ),
    )


def dearest_cycles(compiled: jax.stages.Compiled) -> int:
    """Return the compiler's cycles if each conditional takes its most expensive branch."""
    text = compiled.as_text()
    assert text is not None
    return _Walk(_computations(text), dearest=True).visit("ENTRY", in_loop=False)[0]


class _Walk:
    def __init__(self, computations: dict[str, list[_Instruction]], dearest: bool = False) -> None:
        self._computations = computations
        self._dearest = dearest

    def visit(self, name: str, in_loop: bool) -> tuple[int, Counter[Collective]]:
        """Return the cycles of one run of a computation, and the count of each collective."""
        cycles, counts = 0, Counter[Collective]()
        under_way: dict[str, list[Collective]] = {}  # by the instruction that started them
        for instruction in self._computations.get(name, []):
            done = _ended(instruction, under_way)
            if done is not None:
                counts.update(under_way.pop(done))
                continue
            more_cycles, more_counts = self._of(instruction, in_loop)
            cycles += more_cycles
            if instruction.opcode.endswith("-start") or self._holds(instruction, _ASYNC_START):
                if more_counts:
                    under_way[instruction.name] = list(more_counts.elements())
                continue
            counts.update(more_counts)
            if under_way:
                first = next(iter(under_way))
                under_way[first] = [
                    one._replace(beside_cycles=one.beside_cycles + more_cycles)
                    for one in under_way[first]
                ]
        for started in under_way.values():
            counts.update(started)
        return cycles, counts

    def _holds(self, instruction: _Instruction, target: str) -> bool:
        """Return True for a fusion with a custom call of this target."""
        called = re.search(r"calls=%([\w.-]+)", instruction.text)
        if instruction.opcode != "fusion" or called is None:
            return False
        return any(target in inner.text for inner in self._computations.get(called[1], []))

    def _of(self, instruction: _Instruction, in_loop: bool) -> tuple[int, Counter[Collective]]:
        text, opcode = instruction.text, instruction.opcode
        kind = opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return 0, Counter([_collective(instruction, kind, in_loop)])
        if opcode == "while":
            turns = self._turns(text)
            cycles, counts = self.visit(_callee(text, "body"), in_loop=turns > 1 or in_loop)
            return turns * cycles, Counter({one: turns * n for one, n in counts.items()})
        if opcode == "conditional":
            names = re.search(r"branch_computations=\{([^}]*)\}", text)
            branches = (
                names[1] if names else " ".join(re.findall(r"(?:true|false)_c\w+=(%\S+)", text))
            )
            results = [
                self.visit(branch, in_loop) for branch in re.findall(r"%([\w.-]+)", branches)
            ]
            if self._dearest:
                return max(results, key=lambda result: result[0])
            return min(results, key=lambda result: (_exchanged(result[1]), result[0]))
        if opcode == "call-start":  # runs on a SparseCore, in parallel to the program
            return 0, self.visit(_callee(text, "to_apply"), in_loop)[1]
        own = re.search(r'"estimated_cycles":"(\d+)"', text)
        cycles = int(own[1]) if own else 0
        called = re.search(r"calls=%([\w.-]+)", text) or re.search(
            r"to_apply=%([\w.-]+)", text if opcode == "call" else ""
        )
        if called is None:
            return cycles, Counter()
        inner_cycles, counts = self.visit(called[1], in_loop)
        if own and opcode == "fusion":
            counts = Counter()  # part of an exchange started by another instruction
        # A fusion's estimate includes its contents; other callers have no estimate.
        return cycles if own or opcode == "fusion" else inner_cycles, counts

    def _turns(self, loop: str) -> int:
        """Return the trip count of a loop that compares a counter with a constant; else 1. The
        counters of this package's loops start at 0."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop)
        if known:
            return int(known[1])
        instructions = self._reached(_callee(loop, "condition"))
        compares = [i for i in instructions if "direction=LT" in i.text]
        bounds = [
            int(value[1])
            for i in instructions
            if (value := re.search(r"s32\[\]\S* constant\((\d+)\)", i.text))
        ]
        return bounds[0] if len(compares) == len(bounds) == 1 else 1

    def _reached(self, name: str) -> list[_Instruction]:
        found = list(self._computations.get(name, []))
        for instruction in list(found):
            if called := re.search(r"calls=%([\w.-]+)", instruction.text):
                found += self._reached(called[1])
        return found


def _ended(instruction: _Instruction, under_way: Mapping[str, object]) -> str | None:
    """Return the instruction under way that this instruction waits for."""
    if instruction.opcode.endswith("-done"):
        operand = re.search(r"-done\((?:\([^)]*\) |\S+ )?%([\w.-]+)", instruction.text)
        return operand[1] if operand and operand[1] in under_way else None
    if instruction.opcode == "fusion" and "async-collective-done" in instruction.name:
        return next(iter(under_way), None)
    return None


def _exchanged(counts: Counter[Collective]) -> int:
    return sum(one.num_bytes * times for one, times in counts.items())


def _callee(text: str, role: str) -> str:
    named = re.search(rf"{role}=%([\w.-]+)", text)
    assert named is not None
    return named[1]


def _collective(instruction: _Instruction, kind: str, in_loop: bool) -> Collective:
    arrays = list(_ARRAY.finditer(instruction.shape))
    if instruction.opcode.endswith("-start") and len(arrays) > 1:
        arrays = arrays[1:2]  # (operand, result, ...)
    return Collective(
        kind,
        shape=", ".join(array[0] for array in arrays),
        num_bytes=sum(_num_bytes(*array.groups()) for array in arrays),
        group_size=_group_size(instruction.text),
        times=1,
        in_loop=in_loop,
    )


def _num_bytes(dtype: str, dims: str) -> int:
    """Return the bytes of an HLO array: the first digits of a dtype are its bits."""
    bits = re.search(r"\d+", dtype)  # none in "pred"
    return math.prod(map(int, filter(None, dims.split(",")))) * (int(bits[0]) if bits else 8) // 8


def _group_size(text: str) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]", text)
    return int(iota[1]) if iota else 1


def _computations(text: str) -> dict[str, list[_Instruction]]:
    """Return instructions by computation, with the entry computation as "ENTRY"."""
    found: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] = []
    for line in text.splitlines():
        heading = _COMPUTATION.match(line)
        if heading:
            current = found.setdefault("ENTRY" if line.startswith("ENTRY") else heading[1], [])
        elif match := _INSTRUCTION.match(line):
            current.append(_Instruction(match[1], match[2], match[3], line))
    return found
