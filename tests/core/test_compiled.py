"""Loops are compiled once, before the first step, and kept for the next start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOPS = """
import logging
import numpy as np
from sgl_jax.core.compiled import compile_loops, compiled

@compiled("(int32[::1],)")
def total(values):
    count = 0
    for value in values:
        count += value
    return count

logging.basicConfig(level=logging.INFO, format="%(message)s")
compile_loops()
compile_loops()
print(total(np.arange(5, dtype=np.int32)))
try:
    total(np.arange(5.0))
except TypeError as error:
    print(error)
"""


def run(folder: Path, **environment: str) -> tuple[list[str], list[str]]:
    """The lines that a program with a loop prints, and those that it logs of loops compiled."""
    path = folder / "program.py"
    if not path.exists():
        path.write_text(LOOPS)
    process = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    logged = process.stderr.splitlines()
    return process.stdout.splitlines(), [line for line in logged if line.startswith("compiled")]


def test_a_loop_is_compiled_at_the_first_start_and_loaded_at_the_next(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    for is_first in (True, False):
        printed, logged = run(tmp_path, NUMBA_CACHE_DIR=cache)
        assert printed[0] == "10"
        assert [line.startswith("compiled 1 loops") for line in logged] == [True] * is_first


def test_nothing_is_compiled_for_other_types_later(tmp_path: Path) -> None:
    printed, _ = run(tmp_path)
    assert printed[1].startswith("No matching definition for argument type(s) array(float64")


@pytest.mark.long
def test_where_no_folder_can_be_written_to_each_start_compiles(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        printed, logged = run(
            tmp_path,
            NUMBA_CACHE_DIR=str(tmp_path / "file" / "folder"),
            NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator",
        )
        assert printed[0] == "10"
        assert len(logged) == 1


@pytest.mark.parametrize("module", ["sgl_jax", "sgl_jax.launch_server"])
def test_only_an_engine_loads_the_compiler(module: str) -> None:
    program = f"import sys, {module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
