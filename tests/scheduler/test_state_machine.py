"""Random events in small pools: every page keeps one owner, and every token is right.

The oracle executor raises as soon as a step would read foreign or missing KV, and a request's
tokens must be those that its prompt alone determines.
"""

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sgl_jax.core.messages import AbortRequest, StopRequest
from sgl_jax.scheduler.config import SchedulerConfig
from tests.scheduler.driver import Driver, generate, make_sizes

MAX_QUEUED = 40
STEMS = [[stem * 10 + i % (5 + stem) for i in range(40)] for stem in range(3)]


class SchedulerMachine(RuleBasedStateMachine):
    """One engine; rules are what a front may send and what a loop may do, in any order."""

    @initialize(
        dp_size=st.integers(1, 4),
        page_size=st.sampled_from([1, 4, 16]),
        pool_tokens=st.sampled_from([48, 80, 128]),
        num_rows=st.integers(3, 9),
        chunk=st.sampled_from([1, 3, 8, 16]),
        overlap=st.booleans(),
        radix=st.booleans(),
        policy=st.sampled_from(["fcfs", "lpm"]),
        balance=st.sampled_from(["prefix_aware", "round_robin"]),
        conservativeness=st.sampled_from([0.0, 0.0, 0.3, 20.0]),
        num_draft_tokens=st.sampled_from([0, 0, 1, 3, 4]),
    )
    def start(
        self,
        dp_size: int,
        page_size: int,
        pool_tokens: int,
        num_rows: int,
        chunk: int,
        overlap: bool,
        radix: bool,
        policy: str,
        balance: str,
        conservativeness: float,
        num_draft_tokens: int,
    ) -> None:
        sizes = make_sizes(
            dp_size=dp_size,
            page_size=page_size,
            num_pages=1 + pool_tokens // page_size,
            num_rows=num_rows,
            max_step_tokens=10,
            max_prompt_logprob_tokens=5,
            max_draft_tokens=num_draft_tokens,
        )
        config = SchedulerConfig(
            chunked_prefill_size=chunk,
            use_radix_cache=radix,
            schedule_policy=policy,
            load_balance_method=balance,
            schedule_conservativeness=conservativeness,
            max_queued_requests=MAX_QUEUED,
            num_draft_tokens=num_draft_tokens,
        )
        self.driver = Driver(sizes, config, overlap=overlap)
        self.stopped: dict[str, int] = {}
        self.num_tokens_wanted: dict[str, int] = {}

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
        min_new_tokens = min(rng.choice([0, 0, 3]), max_new_tokens)
        is_full = driver.scheduler.num_waiting >= MAX_QUEUED
        driver.submit(
            generate(
                rid,
                prompt,
                max_new_tokens,
                dp_rank=rng.randrange(sizes.dp_size) if rng.random() < 0.2 else None,
                logprob_start_len=rng.randrange(45) if rng.random() < 0.25 else -1,
                stop_token_ids=tuple(range(num_stop_ids)),
                min_new_tokens=min_new_tokens,
            )
        )
        fits = len(prompt) + max_new_tokens <= sizes.max_request_tokens
        assert (rid in driver.finish) == (is_full or not fits)
        self.num_tokens_wanted[rid] = self.expected_count(
            prompt, max_new_tokens, num_stop_ids, min_new_tokens
        )

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
            self.check_books()

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
        """The front found a stop string, perhaps tokens ago, perhaps while retracted."""
        rid = data.draw(st.sampled_from(self.stoppable()))
        count = len(self.driver.tokens[rid])
        self.stopped[rid] = data.draw(st.integers(max(1, count - 3), count))
        stop = StopRequest(rid=rid, num_output_tokens=self.stopped[rid])
        self.driver.scheduler.stop(stop)

    @rule()
    def messages_for_unknown_requests_do_nothing(self) -> None:
        before = self.driver.scheduler.memory_views()
        self.driver.scheduler.abort(AbortRequest(rid="nobody"))
        self.driver.scheduler.stop(StopRequest(rid="nobody", num_output_tokens=1))
        assert self.driver.scheduler.memory_views() == before

    @rule()
    def flush(self) -> None:
        was_idle = self.driver.scheduler.is_idle
        assert self.driver.scheduler.flush() == was_idle
        if was_idle:
            assert all(view.cached_pages == 0 for view in self.driver.scheduler.memory_views())

    @rule(dice=st.integers(0, 9))
    def fail_all(self, dice: int) -> None:
        """Seldom: the device loses its state."""
        if dice:
            return
        live = self.live()
        self.driver.in_flight.clear()
        self.driver.scheduler.fail_all("lost")
        self.driver.collect()
        assert all(self.driver.finish[rid].status_code == 500 for rid in live)
        self.driver.check_idle()
        assert all(view.cached_pages == 0 for view in self.driver.scheduler.memory_views())

    @invariant()
    def check_books(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.scheduler.check_balance()
        self.driver.scheduler.audit()
        for rid in self.driver.prompts:
            self.driver.check_tokens(rid)

    def teardown(self) -> None:
        """Let all that lives run to its end: it does end, as it should, and leaves nothing."""
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.run()
        assert driver.scheduler.num_waiting == 0
        for rid, prompt in driver.prompts.items():
            if rid in self.stopped:
                assert rid not in driver.finish
            elif driver.finish[rid].type != "abort":
                assert len(driver.tokens[rid]) == self.num_tokens_wanted[rid]
                driver.check_prompt_logprobs(rid, prompt)
            else:
                assert driver.finish[rid].status_code in (None, 400, 500, 503)
        assert driver.scheduler.flush()
        for view in driver.scheduler.memory_views():
            assert view.free_pages == view.total_pages - view.reserved_pages


def test_random_events_leave_the_books_balanced_and_the_tokens_right() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_random_events_leave_the_books_balanced_and_the_tokens_right() -> None:
    """`SGL_JAX_EXAMPLES` sets how many."""
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=int(os.environ.get("SGL_JAX_EXAMPLES", "3000")),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
