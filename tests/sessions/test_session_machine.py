"""Random conversations among random events: every session remembers what it should, no more.

The machine of `tests/scheduler/test_state_machine.py`, with all its rules, and those of sessions.
Models that know nothing of memory say what each streaming session must remember
(`conversations.py`), and which tree of turns each regular one must be (`turn_trees.py`).
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from sgl_jax.core.messages import CloseSession, OpenSession, RollbackSession, SessionTurn
from sgl_jax.core.shares import Tenant
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.row_states import resumable_len
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.events import Note
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request
from sgl_jax.sessions.streaming import StreamingSession
from tests.scheduler.driver import generate
from tests.scheduler.setups import PLAIN, Setup, setups
from tests.scheduler.test_state_machine import (
    NAMESPACES,
    STEMS,
    SchedulerMachine,
    run_machine,
)
from tests.sessions.conversations import Conversations
from tests.sessions.turn_trees import TurnTrees

MAX_SESSIONS = 6
TIMEOUT_S = 8.0
SESSION_TENANTS = [None, Tenant(name="ann"), Tenant(name="bob")]
# The default run's share of examples.
OPTIONS: dict[str, Any] = {
    "max_examples": 20,
    "stateful_step_count": 25,
    "suppress_health_check": [HealthCheck.too_slow],
}


class SessionMachine(SchedulerMachine):
    """Conversations beside plain requests."""

    @initialize(
        setup=setups(
            page_size=st.sampled_from([1, 4, 16, 256]),
            num_rows=st.integers(3, 7),
            num_draft_tokens=st.sampled_from([0, 0, 1, 4]),
            retract_interval=st.sampled_from([0, 0, 0, 1, 3]),
            timeouts_s=st.sampled_from([(0.0, 0.0), (0.0, 0.0), (5.0, 0.0), (0.0, 9.0)]),
            conservativeness=st.sampled_from([0.0, 0.3]),
            no_prefill_bs=st.just(0),
            threshold=st.just(0),
            eviction=st.just("adaptive"),
            session_memory_fraction=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
            max_sessions=st.just(MAX_SESSIONS),
        )
    )
    def start(self, setup: Setup) -> None:
        super().start(setup)
        self.talk = Conversations(self.driver)
        self.trees = TurnTrees(self.driver)
        self.num_opened = 0
        self.tenants: dict[str, Tenant | None] = {}  # of all sessions ever opened
        self.timed: dict[str, float | None] = {}  # session -> used at; None: since the last tick
        # Of turns in flight: sessions evicted before them, tokens their lease held, on what rank.
        self.lease_at_begin: dict[str, tuple[int, int, int]] = {}
        self.first_rank: dict[str, int] = {}  # where each request started, before any retract
        for rank in self.driver.scheduler.ranks:
            self.watch_admissions(rank)
        for namespace in ("", "red"):
            self.open(is_timed=False, namespace=namespace)
        self.open_tree()

    def watch_admissions(self, rank: RankScheduler) -> None:
        """Each admitted request reads the longer of its session's lease and the tree."""
        admit = rank.admit

        def watched(request: Request, cursor: PrefixCursor) -> int:
            cache, matchable = rank.memory.cache, request.matchable()
            lease = None
            if request.kept_by is not None:
                lease = rank.memory.sessions.idle_lease(request.kept_by)
            num_kept = min(request.kept_len, len(matchable))
            in_lease = 0
            if lease is not None and lease.cache_protected_len <= num_kept:
                in_lease = min(lease.kv_committed_len, num_kept)
                if rank.memory.state_group is not None:
                    held = self.states_of(rank, lease, request.tokens[:in_lease])
                    told = resumable_len(rank.memory, lease, in_lease)
                    assert told == -1 or told in held
                    # Slots of drafts may hold what steps long before have left there.
                    has_drafts = rank.memory.sizes.max_draft_tokens > 0
                    in_lease = max(told, 0) if has_drafts else max(held, default=0)
                if not sees_its_windows(rank.memory, lease, in_lease):
                    in_lease = 0
            in_tree = cache.peek(matchable, request.namespace)
            assert cursor.length == in_tree
            assert rank.reusable_len(request, cursor) == max(in_lease, in_tree)
            row = admit(request, cursor)
            assert rank.memory.leases[row].kv_committed_len == max(in_lease, in_tree)
            if request.num_retractions == 0:
                self.first_rank[request.rid] = rank.dp_rank
                assert request.cached_tokens == max(in_lease, in_tree)
            return row

        rank.admit = watched

    def states_of(self, rank: RankScheduler, lease: KVLease, tokens: Int32Array) -> list[int]:
        """After how many of `tokens`, and no fewer than the tree owns, a state is in the slots of
        `lease`, by what these hold."""
        sizes, oracle = rank.memory.sizes, self.driver.oracle
        width = 2 * (1 + sizes.max_draft_tokens)
        own = [sizes.own_slot(lease.row, 0, index) for index in range(width)]
        listed = lease.pages(sizes.page_size)[sizes.state_group]
        slots = [*own, *listed[listed > 0].tolist()]
        return [
            length
            for length in range(lease.cache_protected_len, len(tokens) + 1)
            if length == 0 or oracle.holds_state(rank.dp_rank, slots, tokens[:length])
        ]

    # -- what clients do --------------------------------------------------------------------

    @rule(
        is_timed=st.booleans(),
        namespace=st.sampled_from(NAMESPACES),
        tenant=st.sampled_from(SESSION_TENANTS),
    )
    def open(self, is_timed: bool, namespace: str, tenant: Tenant | None = None) -> None:
        session_id = f"s{self.num_opened}"
        timeout_s = TIMEOUT_S if is_timed else None
        with self.one_more(session_id, tenant) as has_place:
            if has_place:
                self.talk.open(session_id, timeout_s=timeout_s, namespace=namespace, tenant=tenant)
        if is_timed and has_place:
            self.timed[session_id] = None

    def open_tree(self, tenant: Tenant | None = None) -> None:
        session_id = f"t{self.num_opened}"
        namespace = NAMESPACES[(self.num_opened + 1) % len(NAMESPACES)]
        with self.one_more(session_id, tenant) as has_place:
            if has_place:
                self.trees.open(session_id, namespace=namespace, tenant=tenant)

    @contextmanager
    def one_more(self, session_id: str, tenant: Tenant | None) -> Iterator[bool]:
        """Whether there is room for one more session of the tenant, which is opened within: in its
        share, or in place of an idle session without a time-out of the tenant with most."""
        self.settle()
        self.num_opened += 1
        before, part = self.talk.listed(), self.driver.scheduler.args.share_part
        counts = Counter(self.tenants[key] for key in before)
        own, left = counts[tenant], MAX_SESSIONS - len(before) + counts[tenant]
        has_share = own + 1 <= max(int(part * left), min(left, 1))
        idle = [
            key
            for key, each in before.items()
            if not each["num_running"] and each["timeout_s"] is None
        ]
        larger = [counts[self.tenants[key]] for key in idle if counts[self.tenants[key]] > own + 1]
        may_go = {key for key in idle if counts[self.tenants[key]] == max(larger, default=0)}
        if not has_share and not larger:
            opened = OpenSession(rid="", session_id=session_id, tenant=tenant)
            assert self.driver.session(opened).data["status_code"] in (429, 503)
            yield False
            return
        yield True
        self.tenants[session_id] = tenant
        gone = before.keys() - self.talk.listed().keys()
        assert len(gone) == (0 if has_share else 1)
        assert has_share or gone <= may_go
        for key in gone:
            self.talk.of.pop(key, None)
            self.trees.of.pop(key, None)
            ranks = self.driver.scheduler.ranks
            assert not any(rank.memory.sessions.lease_of(key) for rank in ranks)

    def named_by_turn(self, rng: random.Random, session_id: str) -> tuple[str, bool]:
        """The namespace that a turn names, and whether it is neither none nor its session's."""
        own = self.driver.session_namespaces[session_id]
        named = rng.choice(["", "", "", own, own, rng.choice(NAMESPACES)])
        return named, named not in ("", own)

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 5))
    def turns(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            if self.talk.of:
                self.turn(rng, rng.choice(list(self.talk.of)))

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 4))
    def turns_whose_tokens_are_known(self, seed: int, count: int) -> None:
        """Plain requests have computed what the session is told next, or the first of it."""
        rng = random.Random(seed)
        for _ in range(count):
            if not self.talk.of:
                return
            session_id = rng.choice(list(self.talk.of))
            if self.talk.lease(session_id) is None:
                self.turn(rng, session_id)
                for _ in range(20):
                    self.driver.step()
                self.settle()
            new = [*rng.choice(STEMS)[: rng.choice([6, 20])], 43]
            self.compute(rng, self.talk.of[session_id].tokens + new)
            self.turn(rng, session_id, new)
            for _ in range(rng.choice([0, 1, 4])):
                self.driver.step()
            self.settle()

    def turn(self, rng: random.Random, session_id: str, new: list[int] | None = None) -> None:
        """Begin a turn with `new` tokens, or some."""
        driver, sizes = self.driver, self.driver.scheduler.sizes
        conversation = self.talk.of[session_id]
        if new is None:
            new = rng.choice(STEMS)[: rng.choice([0, 0, 0, 3, 12])] + rng.choices([40, 41], k=2)
        was_running = conversation.running
        history = conversation.tokens
        is_whole = rng.random() < 0.25
        if is_whole:
            new = history[: rng.randrange(len(history) + 1)] + new[rng.randrange(2) :]
        max_new_tokens, num_stop_ids = rng.randint(1, 10), rng.choice([0, 0, 3])
        is_length_default = rng.random() < 0.2
        prompt = new if is_whole else history + new
        lease = self.talk.lease(session_id)
        is_full = self.has_no_place()
        has_logprobs = rng.random() < 0.15
        dp_rank = rng.randrange(sizes.dp_size) if rng.random() < 0.15 else None
        namespace, is_foreign = self.named_by_turn(rng, session_id)
        rid = self.talk.begin(
            session_id,
            new,
            max_new_tokens,
            turn=SessionTurn(id=session_id, is_whole=is_whole),
            logprob_start_len=rng.randrange(len(prompt) + 1) if has_logprobs else -1,
            stop_token_ids=tuple(range(num_stop_ids)),
            dp_rank=dp_rank,
            is_length_default=is_length_default,
            namespace=namespace,
        )
        room = sizes.max_request_tokens - len(prompt)
        if is_length_default:
            max_new_tokens = max(min(max_new_tokens, room), 1)
        is_refused = is_full or max_new_tokens > room or was_running is not None
        is_refused = is_refused or is_foreign
        assert (rid in driver.finish) == is_refused
        if was_running is not None:
            conversation.running = was_running
        elif rid not in driver.finish:
            self.note_use(session_id)
            if lease is not None and not is_whole and not has_logprobs and dp_rank is None:
                num_evicted = driver.scheduler.counters()["sessions_evicted"]
                self.lease_at_begin[rid] = num_evicted, lease.kv_committed_len, lease.dp_rank
        self.arrived_s[rid] = self.now_s
        self.num_tokens_wanted[rid] = self.expected_count(prompt, max_new_tokens, num_stop_ids, 0)

    def compute(self, rng: random.Random, prompt: list[int]) -> None:
        """A plain request has these tokens, or the first of them, and some steps."""
        driver, sizes = self.driver, self.driver.scheduler.sizes
        rid = f"r{len(driver.prompts)}"
        prompt = prompt[: rng.choice([len(prompt), rng.randint(1, 60)])]
        if self.has_no_place() or len(prompt) >= sizes.max_request_tokens:
            return
        driver.submit(generate(rid, prompt, 1))
        self.arrived_s[rid], self.num_tokens_wanted[rid] = self.now_s, 1
        for _ in range(rng.choice([3, 12])):
            driver.step()
        self.settle()

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 4))
    def turns_of_trees(self, seed: int, count: int) -> None:
        self.settle()
        rng = random.Random(seed)
        for _ in range(count):
            if self.trees.of:
                self.turn_of_tree(rng)
            else:
                self.open_tree(rng.choice(SESSION_TENANTS))

    def turn_of_tree(self, rng: random.Random) -> None:
        driver, sizes = self.driver, self.driver.scheduler.sizes
        turn = self.trees.draw(rng, rng.choice(list(self.trees.of)))
        new = rng.choice(STEMS)[: rng.choice([0, 0, 12])] + rng.choices([40, 41], k=2)
        prompt, max_new_tokens = self.trees.history(turn) + new, rng.randint(1, 6)
        fits = len(prompt) + max_new_tokens <= sizes.max_request_tokens
        is_full = self.has_no_place()
        namespace, is_foreign = self.named_by_turn(rng, turn.id)
        is_refused = is_full or not fits or is_foreign or self.trees.is_refused(turn)
        rid = self.trees.begin(turn, new, max_new_tokens, namespace=namespace)
        assert (rid in driver.finish) == is_refused
        self.arrived_s[rid] = self.now_s
        self.num_tokens_wanted[rid] = max_new_tokens

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 3))
    def amend(self, seed: int, count: int) -> None:
        """Clients of turns that have ended saw them end earlier, or went and saw nothing; some
        have sent the next turn without having seen the end."""
        rng = random.Random(seed)
        for _ in range(count):
            self.settle()
            if rng.random() < 0.7:
                self.turns_to_amend(rng)
            self.amend_one(rng)
            self.amend_tree(rng)

    def turns_to_amend(self, rng: random.Random) -> None:
        """Some, that have a chance to end."""
        if self.talk.of:
            self.turn(rng, rng.choice(list(self.talk.of)))
        if self.trees.of:
            self.turn_of_tree(rng)
        for _ in range(rng.randrange(15)):
            self.driver.step()
        self.settle()

    def amend_one(self, rng: random.Random) -> None:
        ended = [key for key, each in self.talk.of.items() if each.last is not None]
        if not ended:
            return
        session_id = rng.choice(ended)
        conversation = self.talk.of[session_id]
        if conversation.running is None and rng.random() < 0.5:
            self.turn(rng, session_id)
            for _ in range(rng.choice([0, 0, 1, 3])):
                self.driver.step()
            self.settle()
        rid = conversation.running
        if rng.random() < 0.5:
            was_refused = self.talk.abort_late(session_id)
        else:
            prompt_len = len(self.driver.prompts[conversation.last or ""])
            num_output_tokens = len(conversation.tokens) - prompt_len
            was_refused = self.talk.stop_late(session_id, rng.randint(1, num_output_tokens))
        if was_refused:
            self.note_use(session_id)
            self.lease_at_begin.pop(rid or "", None)

    def amend_tree(self, rng: random.Random) -> None:
        ended = [
            (session_id, name)
            for session_id, tree in self.trees.of.items()
            for name, turn in tree.items()
            if turn.output
        ]
        if not ended:
            return
        session_id, name = rng.choice(ended)
        if rng.random() < 0.5:
            self.trees.abort_late(session_id, name)
        else:
            output = self.trees.of[session_id][name].output or []
            self.trees.stop_late(session_id, name, rng.randint(1, len(output)))

    @precondition(lambda self: self.trees.of)
    @rule(data=st.data())
    def close_tree(self, data: st.DataObject) -> None:
        self.settle()
        self.trees.close(data.draw(st.sampled_from(sorted(self.trees.of))))

    @precondition(lambda self: self.talk.of)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session_id = data.draw(st.sampled_from(sorted(self.talk.of)))
        self.settle()
        # A turn that waits loses the lease that it would have gone on with.
        self.lease_at_begin.pop(self.talk.of[session_id].running or "", None)
        self.talk.close(session_id)
        self.timed.pop(session_id, None)
        reply = self.driver.session(CloseSession(rid="", session_id=session_id))
        assert not reply.ok

    @precondition(lambda self: self.talk.of)
    @rule(data=st.data(), share=st.floats(0.0, 1.0))
    def roll_back(self, data: st.DataObject, share: float) -> None:
        self.settle()
        session_id = data.draw(st.sampled_from(sorted(self.talk.of)))
        conversation = self.talk.of[session_id]
        num_turns = round(share * len(conversation.turn_ends))
        if conversation.running is None:
            self.talk.roll_back(session_id, num_turns)
        else:
            message = RollbackSession(rid="", session_id=session_id, num_turns=num_turns)
            assert not self.driver.session(message).ok

    @precondition(lambda self: self.talk.of)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.settle()
        idle = [key for key, each in sorted(self.talk.of.items()) if each.running is None]
        if not idle:
            return
        session_id, new_session_id = data.draw(st.sampled_from(idle)), f"s{self.num_opened}"
        tenant = self.tenants[session_id]
        with self.one_more(new_session_id, tenant) as has_place:
            if has_place:
                self.talk.fork(session_id, new_session_id, tenant)
        if session_id in self.timed and has_place:
            self.timed[new_session_id] = None

    @rule(rank=st.integers(0, 3))
    def evict(self, rank: int) -> None:
        """As a rank that is short does, but sooner."""
        driver = self.driver
        self.is_replayed = False  # no replay can know of this whim
        chosen = driver.scheduler.ranks[rank % driver.scheduler.sizes.dp_size]
        driver.record(Note(f"rank {chosen.dp_rank} evicts an idle session"))
        num_idle = chosen.memory.sessions.num_idle
        assert chosen.idle_sessions.evict_oldest() == (num_idle > 0)

    # -- what must hold ---------------------------------------------------------------------

    def after_tick(self) -> None:
        """Exactly those sessions were closed that were idle for too long."""
        self.settle()
        for session_id, used_at in list(self.timed.items()):
            self.timed[session_id] = used_at = self.now_s if used_at is None else used_at
            is_idle = self.talk.of[session_id].running is None
            if is_idle and used_at + TIMEOUT_S < self.now_s:
                del self.timed[session_id], self.talk.of[session_id]

    def after_flush(self) -> None:
        """Turns that wait have lost the leases that they would have gone on with."""
        self.lease_at_begin.clear()

    def note_use(self, session_id: str) -> None:
        if session_id in self.timed:
            self.timed[session_id] = None

    def settle(self) -> None:
        """Learn what ended since."""
        driver = self.driver
        for rid, count in self.stopped.items():
            session_id = self.talk.stopped(rid, count)
            if session_id is not None:
                self.note_use(session_id)
        for session_id in self.talk.settle():
            self.note_use(session_id)
        self.trees.settle(self.stopped)
        for rid in list(self.lease_at_begin):
            if rid not in driver.prompt_tokens:
                continue
            num_evicted, num_held, home = self.lease_at_begin.pop(rid)
            is_untouched = driver.scheduler.counters()["sessions_evicted"] == num_evicted
            if is_untouched and driver.tokens[rid] and self.first_rank[rid] == home:
                assert driver.cached[rid] >= num_held

    @invariant()
    def sessions_remember(self) -> None:
        if not hasattr(self, "talk"):
            return
        self.settle()
        self.talk.check()
        self.check_trees()
        self.check_kept()
        for rank in self.driver.scheduler.ranks:
            view, memory = rank.memory.view(), rank.memory
            assert view.free_rows + view.session_rows + rank.num_leases == view.total_rows
            assert view.leased_pages >= 0
            idle = [lease for _, lease in memory.sessions.idle()]
            listed = [memory.by_pool(lease.pages(view.page_size)) for lease in idle]
            kept = {page for by_pool in listed for page in by_pool[0].tolist()}
            share = self.driver.scheduler.args.session_memory_fraction
            assert len(kept) <= int(share * view.pools[0].total_pages)
            for pool, pool_view in enumerate(view.pools):
                own = [lease.pages(view.page_size, lease.cache_protected_len) for lease in idle]
                held = sum(len(memory.by_pool(pages)[pool]) for pages in own)
                assert pool_view.session_held_pages == held
            for session_id, lease in memory.sessions.idle():
                known = len(self.talk.of[session_id].tokens)
                assert 1 <= lease.kv_committed_len == lease.kv_allocated_len <= known
                # The next turn can go on with all of it, and finds room in the windows' pools.
                length = lease.kv_committed_len
                assert resumable_len(memory, lease, length) == length
                self.check_resting_windows(memory, lease)

    def check_resting_windows(self, memory: RankMemory, lease: KVLease) -> None:
        """An idle lease lists no more of a window than a pool of windows has for each row."""
        listed = (lease.pages(memory.page_size) > 0).sum(axis=1)
        for group, num_pages in zip(memory.groups, listed.tolist(), strict=True):
            if group.sliding_window is not None and not group.is_recurrent:
                assert num_pages <= memory.sizes.resting_pages(group)

    def check_trees(self) -> None:
        listed = self.talk.listed().items()
        self.trees.check({key: entry for key, entry in listed if not entry["streaming"]})

    def check_kept(self) -> None:
        """The store's running count is that of the arrays which the sessions keep."""
        store = self.driver.scheduler._sessions.store
        num_kept = 0
        for session, _, _ in store.all():
            if isinstance(session, StreamingSession):
                replaced = session._replaced.tokens if session._replaced else ()
                num_kept += max(len(session.tokens), len(session._pending)) + len(replaced)
                assert session.tokens.base is None or not len(session.tokens)
            else:
                for node in session._nodes.values():
                    num_kept += len(node.added) + (0 if node.output is None else len(node.output))
        assert store.num_kept == num_kept

    def come_to_rest(self) -> None:
        self.settle()
        self.talk.check()
        self.check_trees()
        assert not self.talk.closing
        assert not self.trees.closing
        for session_id in list(self.trees.of):
            self.trees.close(session_id)
        self.talk.close_all()


def test_random_conversations_among_random_events_remember_what_they_should(
    tmp_path: Path,
) -> None:
    run_machine(tmp_path, SessionMachine, **OPTIONS)


def test_turns_of_trees_while_the_queue_is_longer_by_the_rows_that_are_free() -> None:
    """Two random machines failed here: they expected a refusal, though rows were free."""
    machine = SessionMachine()
    machine.start(replace(PLAIN, dp_size=2, session_memory_fraction=1.0, max_sessions=MAX_SESSIONS))
    machine.submit(seed=0, count=40)
    machine.turns_of_trees(seed=0, count=2)
    assert not machine.has_no_place()
    machine.submit(seed=1, count=8)
    assert machine.has_no_place()
    machine.turns_of_trees(seed=0, count=2)
    machine.teardown()


def sees_its_windows(memory: RankMemory, lease: KVLease, length: int) -> bool:
    """Whether `lease` lists all that the token after `length` sees."""
    num_pages = -(-length // memory.page_size)
    paged = [group for group in memory.groups if not group.is_recurrent]
    firsts = [
        0 if group.sliding_window is None else max(length - group.sliding_window + 1, 0)
        for group in paged
    ]
    return all(
        bool((pages[first // memory.page_size : num_pages] > 0).all())
        for first, pages in zip(firsts, lease.pages(memory.page_size)[: len(paged)], strict=True)
    )


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_long_run_of_conversations_among_random_events(tmp_path: Path) -> None:
    """`SGL_JAX_EXAMPLES` sets how many runs."""
    num_examples = int(os.environ.get("SGL_JAX_EXAMPLES", "300"))
    num_steps = run_machine(
        tmp_path,
        SessionMachine,
        max_examples=num_examples,
        stateful_step_count=60,
        suppress_health_check=list(HealthCheck),
    )
    print(f"{num_steps} steps planned")
    assert num_steps >= 60 * num_examples


def test_a_waiting_turn_may_be_computed_again_after_new_weights() -> None:
    machine = SessionMachine()
    machine.start(setup=replace(PLAIN, pool_tokens=48))
    machine.amend(count=1, seed=1)
    machine.turns_whose_tokens_are_known(count=2, seed=1)
    machine.new_weights(keeps_running=False)
    machine.teardown()
