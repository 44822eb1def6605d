"""Runs SGLang's bench_serving from its unpacked wheel: `python sglang_bench.py WHEEL_FOLDER ...`.

The package itself needs a GPU to be imported, the bench does not: what it takes from the package
are constants and the parsing of addresses.
"""

import runpy
import sys
import types
from pathlib import Path


def main() -> None:
    """Let `sglang` be a folder of modules, without what its `__init__` files import."""
    folder = Path(sys.argv.pop(1)) / "sglang"
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    disaggregation = types.ModuleType("sglang.srt.disaggregation.utils")
    disaggregation.FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # type: ignore[attr-defined]
    sys.modules["sglang.srt.disaggregation.utils"] = disaggregation
    runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
