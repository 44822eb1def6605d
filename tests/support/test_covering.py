import itertools

from tests.support.covering import covering

AXES = ((1, 4, 16), (True, False), (True, False), ("none", "ngram", "layer"))


def test_every_two_and_every_three_values_occur_together() -> None:
    for strength in (2, 3):
        rows = covering(AXES, strength)
        assert len(rows) < 36 * (strength - 1) // 2
        for some in itertools.combinations(range(len(AXES)), strength):
            for values in itertools.product(*(AXES[axis] for axis in some)):
                assert any(tuple(row[axis] for axis in some) == values for row in rows)


def test_the_chosen_come_first_and_each_call_finds_the_same() -> None:
    first = (1, False, True, "layer")
    rows = covering(AXES, 2, [first])
    assert rows[0] == first
    assert rows == covering(AXES, 2, [first])
