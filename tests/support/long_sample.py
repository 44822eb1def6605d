"""A pytest plugin that runs a random sample of the long tests.

    scripts/test --long-sample 5                   # about five minutes, with a new seed
    scripts/test --long-sample 5 --long-seed 17    # the same tests again
    scripts/test --long-sample 3 --with-default    # and the default tests, collected once for both
    scripts/test -m long --record-long-seconds     # all of them; updates the recorded times

`long_seconds.json` has the mean seconds of each test function's cases that passed in a recorded
run; other tests are not drawn. A case of more than two minutes is drawn with a probability
in inverse proportion to its time. The sample is as many cases as fit the time of all workers; its
first is drawn whatever it takes, so each recorded test is drawn by some seed. Cases that have not
started when the time is over are skipped. With the default tests one worker runs the sample first
and has the time of all workers for it; the others take over default tests of that worker.
"""

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

SECONDS = Path(__file__).with_name("long_seconds.json")
# Slower tests are drawn less often.
SLOW_S = 120.0
_END = pytest.StashKey[float]()
_recorded: dict[str, list[float]] = defaultdict(list)


def function_of(test_id: str) -> str:
    """Return a test's id without the parameters of its case."""
    return test_id.partition("[")[0]


def draw(
    test_ids: Iterable[str], seconds: Mapping[str, float], seed: int, budget_s: float
) -> list[str]:
    """Draw a sample of the tests in `seconds` without replacement, in the order of the draw.

    Each next test is drawn with weights (Efraimidis and Spirakis, 2006), and taken if it fits what
    is left of the budget; the first one is always taken.

    Args:
        seconds: expected time of each test function.
        budget_s: time of the sample, in seconds of one worker.
    """
    rng = random.Random(seed)
    keyed = []
    for test_id in sorted(test_ids):
        test_s = seconds.get(function_of(test_id))
        if test_s is None:
            continue
        weight = min(1.0, SLOW_S / max(test_s, 0.1))
        keyed.append((rng.random() ** (1 / weight), test_id, test_s))
    sample: list[str] = []
    for _, test_id, test_s in sorted(keyed, reverse=True):
        if not sample or test_s <= budget_s:
            sample.append(test_id)
            budget_s -= test_s
    return sample


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("long tests")
    group.addoption("--long-sample", type=float, metavar="MINUTES", help="time of the sample")
    group.addoption(
        "--with-default", action="store_true", help="run the default tests after the sample"
    )
    group.addoption("--long-seed", type=int, help="seed of the sample; default: a new one")
    group.addoption(
        "--record-long-seconds", action="store_true", help="update tests/support/long_seconds.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long-sample") is None:
        return
    config.option.markexpr = "" if config.option.with_default else "long"
    # The workers of pytest-xdist inherit the environment, and all must draw the same sample.
    if config.option.long_seed is None:
        new_seed = str(random.SystemRandom().randrange(1_000_000))
        config.option.long_seed = int(os.environ.setdefault("SGL_JAX_LONG_SAMPLE_SEED", new_seed))


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--long-sample") is None:
        return None
    minutes, seed = config.option.long_sample, config.option.long_seed
    again = f"--long-sample {minutes:g} --long-seed {seed}"
    again += " --with-default" * config.option.with_default
    return f"long sample: {minutes:g} minutes; the same again: {again}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long-sample") is None:
        return
    by_id = {item.nodeid: item for item in items if item.get_closest_marker("long")}
    known = _known_seconds()
    sample = draw(by_id, known, config.option.long_seed, _budget_s(config))
    left_out = by_id.keys() - set(sample)
    config.hook.pytest_deselected(items=[by_id[test_id] for test_id in left_out])
    default = [item for item in items if item.nodeid not in by_id]
    items[:] = [by_id[test_id] for test_id in sample] + default


def pytest_runtest_setup(item: pytest.Item) -> None:
    config = item.config
    if config.getoption("--long-sample") is None:
        return
    # From the first test on: collecting takes half a minute.
    sample_s = _budget_s(config) if config.option.with_default else _sample_s(config)
    end_s = config.stash.setdefault(_END, time.monotonic() + sample_s)
    if time.monotonic() > end_s and item.get_closest_marker("long"):
        pytest.skip("the time of the sample is over")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.passed and "long" in report.keywords:
        _recorded[report.nodeid].append(report.duration)


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if session.config.getoption("--record-long-seconds") and not is_worker:
        cases: dict[str, list[float]] = defaultdict(list)
        for test_id, phases in _recorded.items():
            cases[function_of(test_id)].append(sum(phases))
        seconds = _known_seconds() | {name: _mean(times) for name, times in cases.items()}
        SECONDS.write_text(json.dumps(dict(sorted(seconds.items())), indent=0) + "\n")


def _mean(times: Sequence[float]) -> float:
    return round(sum(times) / len(times), 1)


def _sample_s(config: pytest.Config) -> float:
    return 60.0 * float(config.option.long_sample)


def _budget_s(config: pytest.Config) -> float:
    """Return the time of all workers."""
    return _sample_s(config) * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))


def _known_seconds() -> dict[str, float]:
    known: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return known
