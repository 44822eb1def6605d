"""Breaks the memory stack on purpose, one way at a time, and shows that the tests notice.

Each mutation is made in a copy of the repository, whose tests of memory, scheduler, sessions,
memory view and deterministic inference are then run until one fails: first those that found
earlier mutations of the file, then those of its folder. One that no test notices is a hole in the
tests, and the exit code is 1.

    scripts/mutation_check                    # all of them
    scripts/mutation_check --only "forget"    # those whose name contains this
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.mutation.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
TESTS = (
    *("tests/mem_cache", "tests/scheduler", "tests/sessions"),
    *("tests/memory_view/test_reader.py", "tests/memory_view/test_frames.py"),
    *("tests/replay/test_view.py", "tests/server/memory/test_memory_routes.py"),
    *("tests/executor/test_store_transfers.py", "tests/executor/test_stored_values.py"),
    *("tests/kernels/test_row_blocks.py", "tests/layers/test_mesh_axes.py"),
    *("tests/kernels/test_invariant.py", "tests/kernels/attention/tpu/test_invariant.py"),
    "tests/kernels/gated_delta",
)
COPIED = ("sgl_jax", "benchmarks", "tests", "pyproject.toml", "README.md")
# A test that takes longer has no end: a mutation that the tests notice. A loop that numba compiled
# hears no time-out of pytest, and is ended by `faulthandler_timeout`.
TEST_TIMEOUT_S = 180
# What pytest exits with when tests ran and some failed: anything else proves nothing.
TESTS_FAILED = 1


class Verdict(NamedTuple):
    """What became of one mutation."""

    mutation: Mutation
    caught: bool
    by: str  # the first test that failed, or what went wrong
    seconds: float


@contextmanager
def applied(mutation: Mutation, root: Path) -> Iterator[None]:
    """Make the change in the tree at `root` for a `with` block. Raises ValueError if its text is
    not there once."""
    path = root / mutation.path
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise ValueError(
            f"{mutation.name}: its text occurs {text.count(mutation.before)} times in "
            f"{mutation.path}, once is wanted"
        )
    written = path.stat()
    path.write_text(text.replace(mutation.before, mutation.after))
    try:
        yield
    finally:
        path.write_text(text)
        # Programs that numba compiled from the unchanged file stay valid.
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))


def tests_of_folder(path: str) -> list[str]:
    """Return the tests that mirror a file of the package, then those of its folder, if any."""
    mirrored = Path("tests", *Path(path).parts[1:])
    candidates = (mirrored.with_name(f"test_{mirrored.name}"), mirrored.parent)
    return [str(candidate) for candidate in candidates if (ROOT / candidate).exists()]


def run_tests(root: Path, first: Sequence[str]) -> tuple[int, str]:
    """Run the tests of the tree at `root`, those of `first` before others, until one fails; return
    the exit code and the output."""
    # What fails is enough: no search for the smallest example.
    options = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=no_shrink")
    limit = ("--timeout", str(TEST_TIMEOUT_S))
    command = [sys.executable, "-m", "pytest", *options, *limit, *first, *TESTS]
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def snapshot(folder: Path) -> None:
    """Copy what the tests need into `folder`, so that no edit disturbs the run."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)


class Judge:
    """Tests copies of the repository, as many at once as it has folders."""

    def __init__(self, pristine: Path, num_folders: int) -> None:
        self._folders: SimpleQueue[Path] = SimpleQueue()
        for index in range(num_folders):
            folder = pristine.with_name(f"{pristine.name}-{index}")
            shutil.copytree(pristine, folder)
            self._folders.put(folder)
        # Files of tests that caught a mutation of a file, the last one first.
        self._caught_by: defaultdict[str, list[str]] = defaultdict(list)

    def verdict(self, mutation: Mutation | None) -> Verdict:
        """Test a copy with the mutation; None tests it as it is."""
        start = time.monotonic()
        root = self._folders.get()
        try:
            if mutation is None:
                code, output = run_tests(root, ())
            else:
                first = [*self._caught_by[mutation.path], *tests_of_folder(mutation.path)]
                with applied(mutation, root):
                    code, output = run_tests(root, first)
        finally:
            self._folders.put(root)
        failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
        if failed and mutation is not None:
            files = self._caught_by[mutation.path]
            file = failed.group(1).partition("::")[0]
            files[:] = [file, *(other for other in files if other != file)]
        by = failed.group(1) if failed else output.strip()[-200:]
        unchanged = Mutation("(nothing changed)", "", "", "")
        return Verdict(mutation or unchanged, code == TESTS_FAILED, by, time.monotonic() - start)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge every mutation, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the mutations to try")
    parser.add_argument("--workers", type=int, default=2, help="mutations tried at once (2)")
    options = parser.parse_args(argv)
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    if not chosen:
        parser.error(f"no mutation has {options.only!r} in its name")
    survivors = []
    with (
        tempfile.TemporaryDirectory(prefix="sgl_jax_pristine_") as folder,
        ThreadPoolExecutor(options.workers) as pool,
    ):
        pristine = Path(folder) / "repository"
        pristine.mkdir()
        snapshot(pristine)
        judge = Judge(pristine, options.workers)
        # The control: if the tests fail on the tree as it is, what they catch means nothing.
        for verdict in pool.map(judge.verdict, [None, *chosen]):
            is_control = verdict.mutation not in chosen
            if verdict.caught == is_control:
                survivors.append(verdict.mutation.name)
            word = "caught" if verdict.caught else "passed"
            print(f"{word}  {verdict.seconds:6.1f} s  {verdict.mutation.name}", flush=True)
            if verdict.caught or not is_control:
                print(f"                  {verdict.by}", flush=True)
    num_caught = len(chosen) - sum(name in {m.name for m in chosen} for name in survivors)
    print(f"{num_caught} of {len(chosen)} mutations caught")
    for name in survivors:
        print(f"not as it should be: {name}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
