"""Rows with states over all that may happen to them: they never go on from a wrong one."""

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_jax.mem_cache.ledger import check_balance
from sgl_jax.mem_cache.release import (
    adopt_prefix,
    free_passed_window_pages,
    release_idle_lease,
    resume_lease,
    roll_back_lease,
)
from sgl_jax.mem_cache.row_states import (
    can_go_back,
    free_passed_snapshots,
    resumable_len,
    state_source,
)
from tests.mem_cache.state_requests import (
    FULL,
    MAX_LEN,
    REFUSED,
    STATES,
    UNWRITTEN,
    WITH_WINDOW,
    Device,
    Request,
    make_memory,
    numbers,
)

CUTS = (3, 8, 13, 20, 29, 40, 47)


class StateLeaseMachine(RuleBasedStateMachine):
    """Requests start, compute prompts and tokens, with drafts that are unread for a while, publish,
    rest as sessions do, go back, go on, fork and end, in pools that are short.

    Steps check what they read (`Device`); after each event the ledger is audited, and the tree's
    snapshots are those of their paths.
    """

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_snapshots=st.sampled_from([2, 6, 30]),
        num_drafts=st.sampled_from([0, 0, 3]),
        groups=st.sampled_from([(FULL, STATES), WITH_WINDOW]),
        radix=st.sampled_from([True, True, True, False]),
    )
    def start(
        self, page_size: int, num_snapshots: int, num_drafts: int, groups: tuple, radix: bool
    ) -> None:
        self.num_drafts, self.radix = num_drafts, radix
        self.memory = make_memory(
            page_size,
            num_pages=160 * len(groups) // page_size,
            num_snapshots=num_snapshots,
            max_draft_tokens=num_drafts,
            groups=groups,
            use_radix_cache=radix,
        )
        self.device = Device(self.memory)
        self.running: list[Request] = []
        self.idle: dict[str, Request] = {}
        self.num_sessions = 0

    # -- running ----------------------------------------------------------------------------

    def open(self, cut: int, then: int) -> None:
        if not self.memory.row_pool.num_free:
            return
        tokens = numbers(then=then, at=cut)
        request = self.device.open(tokens)
        lease = request.lease
        assert lease.kv_committed_len == lease.cache_protected_len
        if lease.kv_committed_len:
            slot = state_source(self.memory, lease)
            assert self.device.written[slot] == request.prefix(lease.kv_committed_len)
        self.running.append(request)

    def compute(self, request: Request, end: int, keep: tuple[int, ...] | None) -> None:
        """A chunk of a prompt."""
        if request.generates:
            return
        if self.device.prefill(request, end, keep):
            self.pass_windows(request)

    def pass_windows(self, request: Request) -> None:
        row, length = request.lease.row, request.lease.kv_committed_len
        free_passed_window_pages(
            self.memory.rows, [self.memory], np.array([row]), np.array([length])
        )

    def decode(self, request: Request, rng: random.Random) -> None:
        num_accepted = rng.randint(0, self.num_drafts)
        if self.device.decode(request, self.num_drafts, num_accepted):
            self.device.accept(request, num_accepted)
            self.pass_windows(request)

    def stop_while_a_step_is_unread(self, request: Request, rng: random.Random) -> None:
        """A step ends the turn; the one after it is in flight, and what it brings is dropped."""
        first, second = (rng.randint(0, self.num_drafts) for _ in range(2))
        if not self.device.decode(request, self.num_drafts, first):
            return
        self.device.accept(request, first)
        num_known = request.lease.kv_committed_len + 1
        is_known = self.num_drafts == 0 or rng.random() < 0.5
        if self.device.decode(request, self.num_drafts, 0, is_known=is_known) and second:
            own = request.slot
            assert own is not None
            for i in range(1, 1 + self.num_drafts):
                self.device.written[own + i] = REFUSED  # of a turn that was over
        self.rest(request, min(num_known, MAX_LEN - 1))

    def publish(self, request: Request) -> None:
        self.device.publish(request)

    def unlock_passed(self, request: Request, certain_len: int) -> None:
        certain_len = min(certain_len, request.lease.kv_committed_len)
        before = self.listed(request)
        free_passed_snapshots(self.memory, request.lease.row, certain_len)
        after = self.listed(request)
        last = max((length for length in before if length <= certain_len), default=0)
        interval = self.device.sizes.snapshot_interval
        protected = request.lease.cache_protected_len
        assert set(after) <= set(before)
        assert set(before) - set(after) == {
            length
            for length in before
            if length < last and (length <= protected or length % interval)
        }

    def listed(self, request: Request) -> list[int]:
        columns = self.memory.rows.pages[request.lease.row, self.memory.state_group].nonzero()[0]
        return ((columns + 1) * self.device.sizes.page_size).tolist()

    def end(self, request: Request, num_known: int, insert: bool) -> None:
        self.running.remove(request)
        self.memory.sessions.unbind(request.lease)
        self.device.end(request, num_known, insert=insert)

    # -- sessions ---------------------------------------------------------------------------

    def rest(self, request: Request, num_known: int) -> None:
        lease, sessions = request.lease, self.memory.sessions
        checked_out = {each.row: session_id for session_id, each in sessions.checked_out()}
        if lease.row not in checked_out:
            self.num_sessions += 1
            checked_out[lease.row] = f"s{self.num_sessions}"
            sessions.bind(checked_out[lease.row], lease)
        self.running.remove(request)
        num_known, page_size = max(num_known, lease.cache_protected_len), self.memory.page_size
        expected = self.check_resumable(request, num_known)
        num_published = min(num_known, lease.kv_committed_len) // page_size * page_size
        least = max(num_published if self.radix else 0, 1)
        session_id = checked_out[lease.row]
        self.device.end(request, num_known)
        if expected < least and not lease.released:
            # The tree had a state where the published part ends, of another row.
            assert self.radix
            expected = num_published
        assert lease.released == (expected < least)
        if not lease.released:
            assert sessions.idle_lease(session_id) is lease
            assert lease.kv_committed_len == lease.kv_allocated_len == expected
            if expected == num_published:
                slot = state_source(self.memory, lease)
                assert self.device.written[slot] == request.prefix(expected)
            self.idle[session_id] = request

    def check_resumable(self, request: Request, length: int) -> int:
        """What can be resumed of the first `length` tokens is what a search of all slots finds."""
        memory, lease, sizes = self.memory, request.lease, self.device.sizes
        found = resumable_len(memory, lease, length)
        most, protected = min(length, lease.kv_committed_len), lease.cache_protected_len
        states = [each for each in self.listed(request) if protected <= each <= most]
        latest = int(memory.rows.state_half[lease.row])
        first = int(memory.rows.state_lens[latest, lease.row])
        if self.num_drafts == 0:
            states += memory.rows.state_lens[:, lease.row].tolist()
        elif first >= 0:
            states.append(first)
        states = [each for each in states if protected <= each <= most]
        if most >= protected == 0:
            states.append(0)
        best = max(states, default=-1)
        if self.num_drafts == 0:
            assert found == (best if best >= 0 and memory.sees_windows(lease, best) else -1)
        elif best >= 0 and memory.sees_windows(lease, best):
            assert found >= best
        assert sizes.state_group is not None
        return found

    def resume(self, session_id: str, length: int, then: int) -> None:
        request = self.idle[session_id]
        expected = self.check_resumable(request, length)
        if expected < 0:
            assert not can_go_back(self.memory, request.lease, length)
            del self.idle[session_id]
            assert release_idle_lease(self.memory, session_id)
            return
        del self.idle[session_id]
        lease = resume_lease(self.memory, session_id, length)
        assert lease is request.lease
        assert lease.kv_committed_len == lease.kv_allocated_len == expected
        tokens = numbers(then=then, at=length)
        tokens[:length] = request.tokens[:length]
        following = Request(tokens, lease)
        num_in_tree = self.memory.cache.peek(tokens[:-1], "", lease.node)
        assert adopt_prefix(self.memory, lease, tokens[:-1]) == (num_in_tree > expected)
        assert lease.kv_committed_len == max(num_in_tree, expected)
        slot = state_source(self.memory, lease)
        assert self.device.written[slot] == following.prefix(lease.kv_committed_len)
        self.running.append(following)

    def roll_back(self, session_id: str, length: int) -> None:
        request = self.idle[session_id]
        expected = self.check_resumable(request, length)
        roll_back_lease(self.memory, session_id, length)
        assert request.lease.released == (expected < 1)
        if request.lease.released:
            del self.idle[session_id]
        else:
            assert request.lease.kv_allocated_len == expected

    # -- what happens -----------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**32))
    def many_things(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            self.one_thing(rng)
            check_balance(self.memory, len(self.running))
        self.device.check(len(self.running))

    @rule(seed=st.integers(0, 2**32))
    def one(self, seed: int) -> None:
        self.one_thing(random.Random(seed))

    def one_thing(self, rng: random.Random) -> None:
        dice = rng.randrange(14)
        request = rng.choice(self.running) if self.running else None
        session_id = rng.choice(list(self.idle)) if self.idle else None
        cut, then = rng.choice(CUTS), rng.randrange(3)
        if dice < 2 or request is None:
            self.open(cut, then)
        elif dice < 4:
            keep = None if rng.random() < 0.5 else tuple(self.some_lengths(rng))
            self.compute(
                request, min(request.lease.kv_committed_len + rng.randint(1, 20), 47), keep
            )
        elif dice < 6:
            self.decode(request, rng)
        elif dice == 6:
            self.publish(request)
        elif dice == 7:
            self.unlock_passed(request, cut)
        elif dice == 8:
            self.rest(request, min(cut, request.lease.kv_committed_len))
        elif dice == 9:
            self.stop_while_a_step_is_unread(request, rng)
        elif dice == 10:
            self.end(request, rng.choice([cut, MAX_LEN]), rng.random() < 0.8)
        elif dice == 11 and session_id is not None:
            self.resume(session_id, rng.choice([cut, self.end_of(session_id)]), then)
        elif dice == 12 and session_id is not None:
            self.roll_back(session_id, rng.choice([0, cut, self.end_of(session_id)]))
        else:
            self.memory.cache.evict(rng.randint(1, 4), rng.randrange(len(self.memory.allocators)))

    def some_lengths(self, rng: random.Random) -> list[int]:
        page = self.device.sizes.page_size
        return [rng.randrange(0, MAX_LEN, page) for _ in range(3)]

    def end_of(self, session_id: str) -> int:
        return min(self.idle[session_id].lease.kv_committed_len, MAX_LEN - 1)

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "memory"):
            self.device.check(len(self.running))
            for request in self.running:
                for length in self.listed(request):
                    slot = self.memory.rows.pages[
                        request.lease.row,
                        self.memory.state_group,
                        length // self.device.sizes.page_size - 1,
                    ]
                    written = self.device.written[int(slot)]
                    is_certain = length <= request.lease.kv_committed_len
                    assert written == request.prefix(length) or not is_certain
                    assert written != UNWRITTEN or not is_certain

    def teardown(self) -> None:
        """All end, everything is evicted, and every slot is free."""
        if not hasattr(self, "memory"):
            return
        for session_id in self.idle:
            assert release_idle_lease(self.memory, session_id)
        for request in list(self.running):
            self.end(request, MAX_LEN, insert=True)
        self.device.check(num_running=0)
        self.memory.cache.reset()
        for allocator in self.memory.allocators:
            assert allocator.num_free == allocator.num_pages - 1


TestStateLeases = StateLeaseMachine.TestCase
TestStateLeases.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


def test_a_session_keeps_the_state_that_another_row_brought_to_the_tree() -> None:
    machine = StateLeaseMachine()
    machine.start(page_size=2, num_snapshots=2, num_drafts=0, groups=(FULL, STATES), radix=True)
    for seed in (982, 452, 115481, 13004, 18333465):
        machine.many_things(seed=seed)
    machine.teardown()
