"""Two ways to serve a load are measured in the order A B B A."""

import pytest

from benchmarks.device.compare import Speeds, measure


def test_blocks_alternate_after_one_of_each_and_both_ways_get_the_same() -> None:
    blocks = []

    def serve(name: str, seed: tuple[int, int]) -> float:
        blocks.append((name, seed))
        return float(len(blocks))

    speeds = measure((lambda seed: serve("a", seed), lambda seed: serve("b", seed)), 2)
    assert "".join(name for name, _ in blocks) == "ab" + "abba" * 2
    seeds = {name: [seed for each, seed in blocks if each == name] for name in "ab"}
    assert seeds["a"] == seeds["b"]
    assert len(set(seeds["a"])) == 5
    assert speeds == Speeds([3.0, 6.0, 7.0, 10.0], [4.0, 5.0, 8.0, 9.0])


def test_the_ratio_is_of_the_times_of_whole_rounds() -> None:
    assert Speeds([1.0, 1.0], [2.0, 2.0]).ratio == pytest.approx(2.0)
    assert Speeds([1.0, 1.0], [1.0, 0.5]).ratio == pytest.approx(2 / 3)
