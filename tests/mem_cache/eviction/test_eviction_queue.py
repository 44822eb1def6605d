"""The eviction queue against a plain set that is searched for its oldest member."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_jax.mem_cache.eviction.eviction_policy import EvictionQueue


@dataclass
class Item:
    node_id: int
    last_access: int


def test_an_empty_queue_has_no_oldest() -> None:
    assert EvictionQueue[Item]().oldest() is None


def test_of_equal_age_the_lower_identity_goes_first() -> None:
    queue = EvictionQueue[Item]()
    for node_id in (3, 1, 2):
        queue.add(Item(node_id, 7))
    oldest = queue.oldest()
    assert oldest is not None
    assert oldest.node_id == 1


def test_the_oldest_is_looked_at_not_taken() -> None:
    queue = EvictionQueue[Item]()
    queue.add(Item(1, 0))
    assert queue.oldest() is queue.oldest()
    assert len(queue) == 1


def test_stale_entries_do_not_pile_up() -> None:
    queue = EvictionQueue[Item]()
    item = Item(1, 0)
    for age in range(10_000):
        item.last_access = age
        queue.add(item)
    assert len(queue._heap) <= 64 + 2 * len(queue) + 1


class QueueMachine(RuleBasedStateMachine):
    """Items age, enter and leave; the queue must know its members and the oldest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = EvictionQueue[Item]()
        self.items = [Item(i, 0) for i in range(12)]
        self.members: set[int] = set()

    @rule(i=st.integers(0, 11), age=st.integers(0, 30))
    def add(self, i: int, age: int) -> None:
        self.items[i].last_access = age
        self.queue.add(self.items[i])
        self.members.add(i)

    @rule(i=st.integers(0, 11))
    def discard(self, i: int) -> None:
        self.queue.discard(self.items[i])
        self.members.discard(i)

    @rule()
    def pop_oldest(self) -> None:
        oldest = self.queue.oldest()
        if oldest is not None:
            self.queue.discard(oldest)
            self.members.remove(oldest.node_id)

    @rule()
    def clear(self) -> None:
        self.queue.clear()
        self.members.clear()

    @invariant()
    def knows_its_members_and_the_oldest(self) -> None:
        assert len(self.queue) == len(self.members)
        assert {item.node_id for item in self.items if item in self.queue} == self.members
        expected = min(
            (self.items[i] for i in self.members),
            key=lambda item: (item.last_access, item.node_id),
            default=None,
        )
        assert self.queue.oldest() is expected


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
