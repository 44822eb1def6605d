"""Shares of a total: what each tenant may hold of it, beside the others."""

from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.core.shares import Shares

PARTS = st.sampled_from([0.01, 0.5, 0.75, 0.9])


def fill(shares: Shares, tenant: str) -> int:
    """Take all that the tenant may have; returns how much it then holds."""
    while shares.may_add(tenant, 1):
        shares.add(tenant, 1)
    return shares.held_by(tenant)


@given(total=st.integers(2, 5000), part=PARTS)
def test_a_tenant_that_takes_all_it_can_leaves_some_to_the_next(total: int, part: float) -> None:
    shares = Shares(total, part)
    assert fill(shares, "a") == shares.most_alone == max(int(part * total), 1)
    assert shares.may_add("b", 1)


@given(total=st.integers(64, 5000), num_tenants=st.integers(1, 8))
def test_tenants_that_take_and_give_back_end_with_nearly_equal_shares(
    total: int, num_tenants: int
) -> None:
    shares, names = Shares(total, 0.75), [str(number) for number in range(num_tenants)]
    for _ in range(200):
        for name in names:
            fill(shares, name)
            shares.add(name, -min(shares.held_by(name), 1 + total // 100))
    held = [fill(shares, name) for name in names]
    assert max(held) - min(held) <= 4 + total // 20
    assert sum(held) < total


def test_with_all_of_the_total_as_its_part_a_tenant_may_take_everything() -> None:
    shares = Shares(7, 1.0)
    assert fill(shares, "a") == 7
    assert not shares.may_add("b", 1)
    shares.add("a", -1)
    assert shares.may_add("b", 1)


def test_no_more_is_kept_for_others_than_was_said() -> None:
    """A tenant alone fills all rows, however short the queue is."""
    assert Shares(260, 0.75, most_kept=4).most_alone == 256
    assert Shares(2300, 0.75, most_kept=2048).most_alone == 1725


def test_the_last_unit_is_for_a_tenant_that_has_none() -> None:
    shares = Shares(2, 0.75)
    assert fill(shares, "a") == 1
    assert fill(shares, "b") == 1
    assert not shares.may_add("c", 1)


def test_tenants_with_more_come_largest_first() -> None:
    shares = Shares(100, 1.0)
    for name, held in (("a", 2), ("b", 9), ("c", 5), ("d", 9)):
        shares.add(name, held)
    assert shares.larger_than(2) == ["b", "d", "c"]
    shares.add("b", -9)
    assert shares.larger_than(0) == ["d", "c", "a"]
