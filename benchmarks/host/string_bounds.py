"""The cost of `maxLength` on the strings of a schema: compiling it, and a mask within a string.

    python -m benchmarks.host.string_bounds --tokenizer-path models/demo

Figures depend on the vocabulary: give the tokenizer of a model that you serve.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sgl_jax.core.grammar import Grammar
from sgl_jax.core.step_plan import mask_words
from sgl_jax.grammar.compiler import GrammarCompiler

_BOUNDS = (None, 10_000, 100_000, 1_000_000)  # characters
_NUM_PROPERTIES = 40
_NUM_TOKENS = 2000
_ROUNDS = 3
_TEXT = Path(__file__).parents[2] / "README.md"


def schema(bound: int | None) -> str:
    """Return an object of strings of at most `bound` characters; None: of any length."""
    string = {"type": "string"} | ({} if bound is None else {"maxLength": bound})
    names = [f"name_{number}" for number in range(_NUM_PROPERTIES)]
    properties = dict.fromkeys(names, string)
    return json.dumps({"type": "object", "properties": properties, "required": names})


def measure(folder: str, bound: int | None) -> tuple[float, list[float]]:
    """Return the least seconds to compile the schema, and the seconds of each token's mask."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    text = json.dumps(_TEXT.read_text(encoding="utf-8").replace('"', "'") * 4)
    output = tokenizer.encode('{"name_0": ' + text, add_special_tokens=False).ids[:_NUM_TOKENS]
    tokens = np.array(output, np.int32)
    compiled, masks = [], np.zeros((1, mask_words(vocab_size)), np.int32)
    for _ in range(_ROUNDS):
        compiler = GrammarCompiler(folder, vocab_size, (0,))
        start = time.perf_counter()
        row = compiler.follow(compiler.compile(Grammar("json_schema", schema(bound))))
        compiled.append(time.perf_counter() - start)
        spent = []
        for num_read in range(len(tokens)):
            start = time.perf_counter()
            row.read(tokens[:num_read])
            row.masks((), masks)
            spent.append(time.perf_counter() - start)
        assert not row.error, row.error
    return min(compiled), spent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host.string_bounds")
    parser.add_argument("--tokenizer-path", default="models/demo", help="folder of tokenizer.json")
    folder = parser.parse_args().tokenizer_path
    print("  maxLength    compiled in       mask: median   99 of 100")
    for bound in _BOUNDS:
        compile_s, spent = measure(folder, bound)
        median, high = np.percentile(spent, (50, 99)) * 1e6
        print(f"{bound or 'none':>11} {compile_s * 1e3:11.2f} ms {median:15.0f} us {high:8.0f} us")


if __name__ == "__main__":
    main()
