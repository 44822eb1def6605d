"""Four CPU devices for every test, so that meshes can be tried without accelerators; and programs
from the compilation cache of this user, where engines keep theirs."""

import faulthandler
import gc
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.quick_compilation import QUICK_FLAGS

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}"

import hypothesis
import jax
import pytest
from hypothesis.internal.conjecture import engine

from sgl_jax.executor.devices import set_compilation_cache
from tests.support.compiled_loops import compile_loops_together
from tests.support.shared_programs import forget_programs

# For who only wants to know that a test fails: `--hypothesis-profile=no_shrink`.
_NO_SHRINK = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
# No test is timed: on a busy machine any example may take long.
hypothesis.settings.register_profile("no_shrink", phases=_NO_SHRINK, database=None, deadline=None)
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")

# The search for the smallest failing case of a state machine ends within its test's time-out.
engine.MAX_SHRINKING_SECONDS = 90

jax.config.update("jax_num_cpu_devices", 4)
set_compilation_cache(None)

_ALL_LONG = re.compile(r"^pytestmark = \[?pytest\.mark\.long\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module of long tests, with the clients of other people, if none of them runs."""
    if config.option.markexpr != "not long" or collection_path.suffix != ".py":
        return None
    return True if _ALL_LONG.search(collection_path.read_text()) else None


def pytest_collection_finish() -> None:
    """Compile the loops while all workers do, before their first tests. Leave modules and collected
    tests out of garbage collections, which would walk them often."""
    if "PYTEST_XDIST_WORKER" in os.environ and "sgl_jax.scheduler.scheduler" in sys.modules:
        compile_loops_together()
    _freeze()
    gc.set_threshold(20_000, 10, 10)


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a worker end no earlier than a minute after the test's own time-out.

    `faulthandler_timeout` is one for all tests, and ends those that may take longer.
    """
    marker = item.get_closest_marker("timeout")
    if marker is None or not faulthandler.is_enabled():
        return
    seconds = marker.args[0]
    faulthandler.cancel_dump_traceback_later()
    if seconds:
        faulthandler.dump_traceback_later(seconds + 60, exit=True, file=sys.__stderr__)


# A process may have 65,530 on Linux by default; XLA's compiler crashes at the limit.
MOST_MAPS = 20_000
# Within a module of long tests, whose engines share programs.
MOST_MAPS_OF_MODULE = 40_000
_MAPS = Path("/proc/self/maps")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget compiled programs between modules if there are many: each has memory maps.

    A module of long tests may compile too many alone.
    """
    is_last = nextitem is not None and nextitem.path != item.path
    if not is_last and (nextitem is None or item.get_closest_marker("long") is None):
        return
    most = MOST_MAPS if is_last else MOST_MAPS_OF_MODULE
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > most:
        forget_programs()
        jax.clear_caches()
        gc.unfreeze()
    if not gc.get_freeze_count():  # or tests of garbage have unfrozen all
        _freeze()


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """Give back the handlers and levels that a test changes.

    A handler of a command's `main` writes to the test's captured stream, which is closed by the
    time that a thread of another test logs.
    """
    loggers = logging.getLogger(), logging.getLogger("sgl_jax")
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
