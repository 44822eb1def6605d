"""Random events in small pools: every page keeps one owner, and every token is right.

The oracle executor raises as soon as a step would read foreign or missing KV, and a request's
tokens must be those that its prompt alone determines. A failure leaves a recording of the events
that led to it, to be run again with `python -m sgl_jax.replay`.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sgl_jax.core.messages import AbortRequest, PauseMode, StopRequest
from sgl_jax.core.shares import Tenant
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree import cache_walk
from sgl_jax.mem_cache.tree.block_log import BlocksCleared, BlocksRemoved, BlocksStored
from sgl_jax.scheduler.events import (
    DecodeSteps,
    Flush,
    NewWeights,
    Note,
    PrefillRate,
    Resume,
    StoreOverdue,
    StoreSuspended,
)
from tests.mem_cache.tree_model import held_blocks
from tests.scheduler.driver import Driver, generate
from tests.scheduler.liveness import Liveness
from tests.scheduler.setups import MAX_QUEUED, PLAIN, Setup, setups
from tests.support.faults import FaultyExecutor, no_more_pages

NAMESPACES = ("", "red", "blue")
# Priorities; some requests are as important as may be.
VALUES = (0, 0, 1, -7, 50, 2**31 - 1, -(2**31))
# The default run's share of examples.
OPTIONS: dict[str, Any] = {
    "max_examples": 50,
    "stateful_step_count": 20,
    "suppress_health_check": [HealthCheck.too_slow],
}
STEMS = [[stem * 10 + i % (5 + stem) for i in range(40)] for stem in range(3)]


class LoggedBlocks:
    """The blocks of one rank's cache, by its log alone."""

    def __init__(self, memory: RankMemory) -> None:
        self.memory = memory
        self.log = memory.log_blocks()
        self.blocks: set[int] = set()

    def check(self) -> None:
        for event in self.log.take():
            match event:
                case BlocksStored():
                    assert event.parent is None or event.parent in self.blocks
                    assert not self.blocks & {*event.hashes.tolist()}
                    self.blocks |= {*event.hashes.tolist()}
                case BlocksRemoved():
                    assert self.blocks >= {*event.hashes.tolist()}
                    self.blocks -= {*event.hashes.tolist()}
                case BlocksCleared():
                    self.blocks.clear()
        assert self.blocks == held_blocks(self.memory.cache)


class SchedulerMachine(RuleBasedStateMachine):
    """One engine; rules are what a frontend may send and what a loop may do, in any order.

    `tests/sessions/test_session_machine.py` adds conversations to it.
    """

    audit_interval = 1  # steps from one full walk to the next

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        self.driver = Driver(
            setup.sizes(),
            setup.args(),
            max_unread=setup.max_unread,
            max_skip_count=setup.max_skip_count,
        )
        self.slices = self.driver.scheduler.audit_slices()
        self.liveness = Liveness(self.driver.scheduler)
        ranks = self.driver.scheduler.ranks
        self.logged_blocks = [LoggedBlocks(rank.memory) for rank in ranks]
        self.driver.after_plan = self.liveness.check
        self.num_checked: dict[str, int] = {}  # tokens of each request that were proved
        self.executor = FaultyExecutor(self.driver.oracle)
        self.driver.executor = self.executor
        if setup.is_fair:
            # About as many tokens are computed as loaded in the time of a transfer.
            self.driver.scheduler.handle(PrefillRate(4e4))
        self.driver.oracle.host.failure_rate = self.driver.oracle.host.loss_rate = 0.1
        self.is_replayed = setup.is_replayed
        self.num_tenants = setup.num_tenants
        self.now_s = 100.0
        self.driver.tick(self.now_s)
        self.arrived_s: dict[str, float] = {}
        self.stopped: dict[str, int] = {}
        self.num_tokens_wanted: dict[str, int] = {}
        self.checked_cached: dict[str, None] = {}  # requests whose cached tokens were proved

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 8))
    def submit(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            self.submit_one(rng)

    def submit_one(self, rng: random.Random) -> None:
        driver, sizes = self.driver, self.driver.scheduler.sizes
        rid = f"r{len(driver.prompts)}"
        prompt = rng.choice(STEMS)[: rng.randrange(41)]
        prompt = prompt + rng.choices([40, 41, 42], k=rng.randint(1, 6))
        max_new_tokens = rng.randint(1, 24)
        num_stop_ids = rng.choice([0, 0, 1, 3])
        num_top = rng.choice([-1, -1, -1, 0, 2])
        min_new_tokens = min(rng.choice([0, 0, 3]), max_new_tokens)
        tenant = self.draw_tenant(rng)
        is_full = self.has_no_place(tenant)
        driver.submit(
            generate(
                rid,
                prompt,
                max_new_tokens,
                dp_rank=rng.randrange(sizes.dp_size) if rng.random() < 0.2 else None,
                logprob_start_len=rng.randrange(len(prompt) + 1) if rng.random() < 0.25 else -1,
                stop_token_ids=tuple(range(num_stop_ids)),
                return_logprob=num_top >= 0,
                top_logprobs_num=max(num_top, 0),
                token_ids_logprob=rng.choices(range(sizes.vocab_size), k=rng.choice([0, 0, 1, 5])),
                min_new_tokens=min_new_tokens,
                namespace=rng.choice(["", *NAMESPACES]),
                priority=rng.choice(VALUES),
                tenant=tenant,
            )
        )
        fits = len(prompt) + max_new_tokens <= sizes.max_request_tokens
        assert (rid in driver.finish) == (is_full or not fits) or self.is_refused(rid)
        self.arrived_s[rid] = self.now_s
        self.num_tokens_wanted[rid] = self.expected_count(
            prompt, max_new_tokens, num_stop_ids, min_new_tokens
        )

    def has_no_place(self, tenant: Tenant | None = None) -> bool:
        """Whether a further request of the tenant is refused: rows that are free make the queue
        longer. With shares a tenant has three quarters of what the others leave, or all of it but
        the queue."""
        scheduler = self.driver.scheduler
        num_rows = scheduler.sizes.dp_size * (scheduler.sizes.num_rows - 1)
        most, requests = MAX_QUEUED + num_rows, list(scheduler._requests.values())
        own = sum(request.message.tenant == tenant for request in requests)
        left = most - (len(requests) - own)
        if scheduler.args.fair_share == "tokens" and (tenant is None or not tenant.max_queued):
            left = max(3 * left // 4, left - MAX_QUEUED, min(left, 1))
        return len(requests) >= most or own >= left

    def draw_tenant(self, rng: random.Random) -> Tenant | None:
        """None, or one of the tenants: some have limits, and weights differ."""
        number = rng.randint(0, self.num_tenants)
        if not number:
            return None
        return Tenant(
            name=f"t{number}",
            weight=(0.5, 1.0, 3.0)[number % 3],
            max_queued=6 if number == 2 else 0,
            max_running=2 if number == 3 else 0,
        )

    def is_refused(self, rid: str) -> bool:
        """Whether as many requests of its tenant waited as may."""
        return rid in self.driver.finish and self.driver.finish[rid].status_code == 429

    def expected_count(
        self, prompt: list[int], max_new_tokens: int, num_stop_ids: int, min_new_tokens: int
    ) -> int:
        """Tokens up to the first stop token that counts, or the limit."""
        output = self.driver.oracle.expected_output(prompt, max_new_tokens)
        for count, token in enumerate(output, start=1):
            if token < num_stop_ids and count > min_new_tokens:
                return count
        return max_new_tokens

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()
            self.check_ledger()

    def live(self) -> list[str]:
        return [
            rid
            for rid in self.driver.prompts
            if rid not in self.driver.finish and rid not in self.stopped
        ]

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(self.live()))
        self.driver.abort(rid)
        assert self.driver.finish[rid].type == "abort"

    def stoppable(self) -> list[str]:
        """Live requests with output, the retracted ones first."""
        waiting = {request.rid for request in self.driver.scheduler._waiting}
        live = [rid for rid in self.live() if self.driver.tokens[rid]]
        return sorted(live, key=lambda rid: rid not in waiting)

    @precondition(lambda self: self.stoppable())
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """The frontend found a stop string, perhaps tokens ago, perhaps while retracted."""
        rid = data.draw(st.sampled_from(self.stoppable()))
        count = len(self.driver.tokens[rid])
        self.stopped[rid] = data.draw(st.integers(max(1, count - 3), count))
        stop = StopRequest(rid=rid, num_output_tokens=self.stopped[rid])
        self.driver.scheduler.handle(stop)

    @rule()
    def messages_for_unknown_requests_do_nothing(self) -> None:
        before = self.driver.scheduler.memory_views()
        self.driver.scheduler.handle(AbortRequest(rid="missing"))
        self.driver.scheduler.handle(StopRequest(rid="missing", num_output_tokens=1))
        assert self.driver.scheduler.memory_views() == before

    @rule()
    def flush(self) -> None:
        scheduler = self.driver.scheduler
        was_free = not (scheduler.num_running or scheduler.offload.is_storing)
        assert self.driver.scheduler.handle(Flush()) == was_free
        if was_free:
            assert all(view.cached_pages == 0 for view in self.driver.scheduler.memory_views())
            for rank in self.driver.scheduler.ranks:
                if rank.host.tier is not None:
                    assert all(view.cached_blocks == 0 for view in rank.host.views())
                    copies = rank.host.tier.blocks.copies.values()
                    assert not any(copy.is_wanted for copy in copies), "a copy outlives the flush"
            self.after_flush()

    def after_flush(self) -> None:
        """All caches are empty."""

    @rule(answers=st.booleans())
    def the_store_answers_or_not(self, answers: bool) -> None:
        self.driver.scheduler.handle(StoreSuspended(answers))

    @rule(data=st.data())
    def a_transfer_of_the_store_is_overdue(self, data: st.DataObject) -> None:
        """No request waits for it any more; it ends later."""
        for rank in self.driver.scheduler.ranks:
            if rank.host.store is not None:
                under_way = sorted(rank.host.store._moving)
                if under_way:
                    number = data.draw(st.sampled_from(under_way))
                    self.driver.scheduler.handle(StoreOverdue(rank.dp_rank, number))

    @rule(
        mode=st.sampled_from(["abort", "retract", "in_place"]),
        seed=st.integers(0, 2**32),
        flushes=st.booleans(),
    )
    def pause(self, mode: PauseMode, seed: int, flushes: bool) -> None:
        """No step is planned; what ran is left, or has no memory. It all goes on afterwards."""
        driver, scheduler = self.driver, self.driver.scheduler
        live, running, num_plans = self.live(), scheduler.num_running, len(driver.plans)
        driver.pause(mode)
        self.check_ledger()
        scheduler.audit()
        assert scheduler.num_running == (running if mode == "in_place" else 0)
        if mode != "in_place":
            self.check_nothing_leased()
        ended = [rid for rid in live if rid in driver.finish]
        assert ended == (live if mode == "abort" else [])
        self.submit(seed, 2)
        if flushes:
            self.flush()
        self.step(driver.max_unread + 2)
        assert not driver.in_flight
        assert len(driver.plans) == num_plans
        driver.scheduler.handle(Resume())

    @rule(keeps_running=st.booleans())
    def new_weights(self, keeps_running: bool) -> None:
        """Between two steps; no request finds what was computed before."""
        driver, scheduler = self.driver, self.driver.scheduler
        if scheduler.offload.is_storing:
            return  # the loop gives writes up first
        running = {rid for rid in self.live() if scheduler._requests[rid].lease is not None}
        kept = scheduler.handle(NewWeights(keeps_running))
        assert set(kept) <= (running if keeps_running else set())
        assert scheduler.num_running == len(kept)
        for rank, view in zip(scheduler.ranks, scheduler.memory_views(), strict=True):
            assert all(node.is_withdrawn for node in rank.memory.cache.nodes())
            assert view.session_rows == 0
            assert all(own.cached_blocks == 0 for own in rank.host.views())
        self.check_ledger()
        scheduler.audit()
        driver.collect()
        self.after_flush()

    def check_nothing_leased(self) -> None:
        """No page is leased, but by fetches from the host."""
        scheduler = self.driver.scheduler
        for rank, view in zip(scheduler.ranks, scheduler.memory_views(), strict=True):
            fetches = rank.host.tier.fetches.values() if rank.host.tier else ()
            paged = [pool.kind == "pages" for pool in view.pools]
            moving = [
                len(pages)
                for fetch in fetches
                for is_paged, pages in zip(paged, fetch.move.pages, strict=True)
                if is_paged
            ]
            assert view.leased_pages == sum(moving)

    @rule(rank=st.integers(0, 3), count=st.integers(1, 3))
    def steps_while_a_rank_gets_no_pages(self, rank: int, count: int) -> None:
        driver = self.driver
        memory = driver.scheduler.ranks[rank % driver.scheduler.sizes.dp_size].memory
        self.is_replayed = False  # no replay can know of this whim
        driver.record(Note(f"for {count} steps, rank {memory.dp_rank} is refused pages"))
        with no_more_pages(memory):
            self.step(count)

    @rule(elapsed_s=st.floats(0.0, 6.0))
    def time_goes_on(self, elapsed_s: float) -> None:
        """Exactly those end that are too old, or too old to start."""
        driver, config = self.driver, self.driver.scheduler.args
        self.now_s += elapsed_s
        unstarted = {r.rid for r in driver.scheduler._waiting if r.num_retractions == 0}
        live = self.live()
        driver.tick(self.now_s)
        for rid in live:
            age_s = self.now_s - self.arrived_s[rid]
            status = driver.finish[rid].status_code if rid in driver.finish else None
            if 0 < config.request_timeout < age_s:
                assert status == 504
            elif rid in unstarted and 0 < config.waiting_timeout < age_s:
                assert status == 503
            else:
                assert status is None
        self.after_tick()

    @rule(num_steps=st.integers(1, 16))
    def the_loop_chooses_the_steps_of_a_plan(self, num_steps: int) -> None:
        most = self.driver.scheduler.sizes.max_decode_steps
        self.driver.scheduler.handle(DecodeSteps(min(num_steps, most)))

    @rule(num_rows=st.integers(0, 30))
    def a_row_will_not_be_finite(self, num_rows: int) -> None:
        """The next but so many to run. It ends alone, or with those that read it at once."""
        self.driver.oracle.rows_to_glitch = num_rows

    @rule(dice=st.integers(0, 9), in_launch=st.booleans())
    def fail_a_step(self, dice: int, in_launch: bool) -> None:
        """Seldom: the device loses its state."""
        if dice:
            return
        executor = self.executor
        if in_launch:
            executor.failing_launches = {executor.num_launched}
        else:
            executor.failing_results = {executor.num_read}
        for _ in range(self.driver.max_unread + 1):
            live = self.live()
            self.driver.step()
            if executor.num_failed:
                assert all(self.driver.finish[rid].status_code == 500 for rid in live)
                self.driver.check_idle()
                views = self.driver.scheduler.memory_views()
                assert all(view.cached_pages == 0 for view in views)
                break
        executor.disarm()

    def audit_a_slice(self) -> None:
        """Walk a few nodes more of a cache that has changed since the last slice."""
        with patch.object(cache_walk, "_NODES", 3):
            if next(self.slices, "end") == "end":
                self.slices = self.driver.scheduler.audit_slices()

    @invariant()
    def check_ledger(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.scheduler.check_balance()
        self.audit_a_slice()
        if len(self.driver.plans) % self.audit_interval == 0:
            self.driver.scheduler.audit()
        for rank in self.driver.scheduler.ranks:
            running, rows = rank.running, rank.running.active
            unread, lengths = running.columns.unread_drafts[rows], rank.memory.rows
            assert (unread >= 0).all()
            assert (
                running.columns.planned_len[rows] + unread <= running.columns.max_len[rows]
            ).all()
            possible = lengths.kv_committed_len[rows] + unread
            assert (possible <= lengths.kv_allocated_len[rows]).all()
            sizes = self.driver.scheduler.sizes
            num_pages = -(-lengths.kv_allocated_len // sizes.page_size)
            paged = [group for group in sizes.groups if not group.is_recurrent]
            for number, group in enumerate(paged):
                most = sizes.row_pages(group)
                held = num_pages - lengths.first_pages[number]
                assert (held <= most).all()
        for rid, tokens in self.driver.tokens.items():
            if self.num_checked.get(rid) != len(tokens):
                self.num_checked[rid] = len(tokens)
                self.driver.check_tokens(rid)
        for logged in self.logged_blocks:
            logged.check()
        self.driver.check_namespaces()
        self.check_priorities()
        for rid in self.driver.cached:
            if rid not in self.checked_cached:
                self.checked_cached[rid] = None
                self.driver.check_cached(rid)

    def check_priorities(self) -> None:
        """Larger is more important, and all are alike unless priorities count."""
        config = self.driver.scheduler.args
        sign = -1 if config.schedule_low_priority_values_first else 1
        for request in self.driver.scheduler._requests.values():
            expected = sign * request.message.priority if config.enable_priority_scheduling else 0
            if config.priority_aging_s:
                expected -= int(self.arrived_s[request.rid] // config.priority_aging_s)
            assert request.priority == expected

    def teardown(self) -> None:
        """Let all that lives run to its end: it does end, as it should, and leaves nothing."""
        if not hasattr(self, "driver") or sys.exc_info()[0] is not None:
            return  # after a failure the recording ends with what led to it
        driver = self.driver
        # With chunks of a token, no tree and many retracts, each token costs a whole prefill.
        driver.run(max_steps=50_000)
        self.come_to_rest()
        assert driver.scheduler.num_waiting == 0
        for rid, prompt in driver.prompts.items():
            if rid in self.stopped:
                assert rid not in driver.finish
            elif driver.finish[rid].type != "abort":
                assert len(driver.tokens[rid]) == self.num_tokens_wanted[rid]
                driver.check_prompt_logprobs(rid, prompt)
                driver.check_logprobs(rid)
            else:
                assert driver.finish[rid].status_code in (None, 400, 429, 500, 503, 504)
        assert driver.scheduler.handle(Flush())
        for view in driver.scheduler.memory_views():
            assert view.free_pages == view.total_pages - view.reserved_pages
        if self.is_replayed:
            driver.check_replay()

    def after_tick(self) -> None:
        """Time went on to `now_s`."""

    def come_to_rest(self) -> None:
        """All requests have ended."""


def run_machine(
    folder: Path,
    kind: type[SchedulerMachine] = SchedulerMachine,
    *,
    random_seed: int | None = None,
    **options: Any,
) -> int:
    """Run it, with `random_seed` or a fresh one; should it fail, say where the events of the
    smallest failing run are.

    Returns how many steps all its runs took together.
    """
    machines: list[SchedulerMachine] = []
    num_steps = 0

    def count() -> None:
        nonlocal num_steps
        if machines and hasattr(machines[0], "driver"):
            num_steps += len(machines[0].driver.plans)

    def make() -> SchedulerMachine:
        count()
        machines[:] = [kind()]
        return machines[0]

    if random_seed is not None:
        seed(random_seed)(make)
    try:
        run_state_machine_as_test(make, settings=settings(deadline=None, **options))  # type: ignore[arg-type]
    except BaseException as error:
        if machines and hasattr(machines[0], "driver"):
            path = machines[0].driver.save_recording(folder)
            error.add_note(f"its events: python -m sgl_jax.replay --verbose {path}")
        raise
    count()
    return num_steps


def test_random_events_leave_the_ledger_balanced_and_the_tokens_right(tmp_path: Path) -> None:
    run_machine(tmp_path, **OPTIONS)


def test_a_request_is_replaced_no_sooner_than_in_the_step_after_its_start() -> None:
    """The forecast falls as short requests start, and the last row is taken before a request fits
    that could replace one of them."""
    setup = replace(
        PLAIN, page_size=4, num_rows=5, chunk=64, conservativeness=10.0, priorities=(True, False)
    )
    machine = SchedulerMachine()
    machine.start(setup=setup)
    machine.submit(count=8, seed=472016)
    machine.steps_while_a_rank_gets_no_pages(count=2, rank=0)
    machine.submit(count=5, seed=96)
    machine.teardown()
