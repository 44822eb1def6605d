"""Copies of weights and of the cache in a compiled program, found in its text."""

import math
import re

import jax

from sgl_jax.planner.engine_programs import EngineProgramsOnPaper

MAX_COPY_BYTES = 2**20
_FUSED = re.compile(r" fusion\(.*?calls=%([\w.-]+)")
_COMPUTATION = re.compile(r"^%?([\w.-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b[a-z]+(\d+)\w*\[([\d,]+)\](\S*?)(?=[,)]* |, |$)")
_UPDATES_ITS_OPERAND = re.compile(r"^\s+ROOT .* dynamic-update-slice\(%param")
_IN_VMEM = "S(1)"
# Of an instruction whose result is changed in place, or is no copy.
_MAKES_OTHERS = ("output_to_operand_aliasing", 'custom_call_target="tpu_custom_call"')
# What has a result and computes none; a start has its result at its end.
_PASSES_ON = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"),
    *("copy-start", "slice-start", "call-start", "async-start", "opt-barrier"),
}


def pools_of(engine: EngineProgramsOnPaper) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arrays that hold the cache: pages, and the states of recurrent layers."""
    states = engine.state.states
    return (*engine.state.kv_pools, *(() if states is None else states.layers))


def shapes_kept(engine: EngineProgramsOnPaper) -> set[tuple[int, ...]]:
    """Of each large weight, of all layers and of one, and of the cache, on one device."""
    kept = set()
    for own in jax.tree.leaves((engine.placed.params, pools_of(engine))):
        shape = own.sharding.shard_shape(own.shape)
        kept |= {shape, shape[1:]} if len(shape) > 2 else {shape}
    return {shape for shape in kept if 2 * math.prod(shape) > MAX_COPY_BYTES}


def copies(text: str, kept: set[tuple[int, ...]], num_tokens: int) -> list[str]:
    """Instructions that write an array as large as one of `kept` anew, into HBM.

    What is fused is not written, what is fetched into VMEM is no copy, and neither is what is
    changed in place. An array with an axis of `num_tokens`, or with first axes of as many, is one
    of activations, and so is what is gathered, or what a Pallas kernel makes: lines of experts may
    be as large as some weight. The states of one slot in all layers are copied to another slot, and
    may be as large, too.
    """
    sizes = {math.prod(shape) for shape in kept}
    slots = [[shape[0], 1, *shape[2:]] for shape in kept if len(shape) == 5]
    fused, in_place = set(_FUSED.findall(text)), _updates_in_place(text)
    found, here = [], ""
    for line in text.splitlines():
        if heading := _COMPUTATION.match(line):
            here = heading[1]
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction is None or here in fused or instruction[3] in _PASSES_ON:
            continue
        calls = _FUSED.search(line)
        if calls is not None and calls[1] in in_place:
            continue
        if instruction[1].startswith("gather") or any(word in line for word in _MAKES_OTHERS):
            continue
        for bits, dims, layout in _ARRAY.findall(instruction[2]):
            shape = [int(dim) for dim in dims.split(",")]
            num_bytes = math.prod(shape) * int(bits) // 8
            is_large = num_bytes > MAX_COPY_BYTES and _IN_VMEM not in layout
            # Rows that chips exchange have an axis of chips before that of their rows.
            is_other = num_tokens in (*shape, math.prod(shape[:2])) or shape in slots
            if is_large and math.prod(shape) in sizes and not is_other:
                found.append(f"{instruction[1]} = {instruction[2]} in {here}")
    return found


def _updates_in_place(text: str) -> set[str]:
    """Computations that write a slice of an array they are given.

    Where the array could not be overwritten, the compiler copies it before, which is found.
    """
    found, here = set(), ""
    for line in text.splitlines():
        if heading := _COMPUTATION.match(line):
            here = heading[1]
        elif _UPDATES_ITS_OPERAND.match(line):
            found.add(here)
    return found
