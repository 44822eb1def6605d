"""What the scheduler tells the cache of a conversation's next request."""

from typing import Any

from sgl_jax.core.messages import Reuse
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.mem_cache.eviction.path_records import FIRST_CLASS, REPLACED, class_of
from sgl_jax.mem_cache.eviction.shadow_pages import RETURN
from tests.scheduler.driver import Driver, generate, make_sizes

PROMPT = [*range(3, 27)]


class Agent:
    """One conversation on an engine of its own."""

    def __init__(self, **settings: Any) -> None:
        self.driver = Driver(make_sizes(num_pages=61), SchedulerArgs(**settings))
        self.prompt, self.now_s = PROMPT, 100.0
        self.driver.tick(self.now_s)

    def turn(
        self, after_s: float, num_tokens: int = 3, num_unknown_hints: int = 0, **reuse: Any
    ) -> int:
        """Send the next request after a pause; return the class of its path's leaf."""
        self.now_s += after_s
        self.driver.tick(self.now_s)
        rid = str(len(self.prompt))
        hints = {"reuse": Reuse(**reuse), "num_unknown_hints": num_unknown_hints}
        self.driver.submit(generate(rid, self.prompt, num_tokens, ignore_eos=True, **hints))
        self.driver.run()
        self.prompt = [*self.prompt, *self.driver.tokens[rid], 1, 2]
        nodes = self.driver.scheduler.ranks[0].memory.cache.nodes()
        return max(nodes, key=lambda node: node.end).return_class


def test_pauses_are_those_from_an_answer_to_the_next_request() -> None:
    agent = Agent()
    assert agent.turn(0.0, agent="a") == FIRST_CLASS
    assert agent.turn(8.0, agent="a") == round(0.7 * FIRST_CLASS + 0.3 * class_of(8.0))


def test_an_answer_without_a_call_is_final_and_a_forecast_is_taken_as_it_is() -> None:
    agent = Agent()
    token = 28  # of no answer: checked below
    assert agent.turn(0.0, call_token_ids=(token,)) == FIRST_CLASS - 8
    answer = agent.prompt[len(PROMPT) : -2]
    assert token not in answer
    again = Agent()
    assert again.turn(0.0, call_token_ids=(token, answer[1])) == FIRST_CLASS
    assert again.turn(8.0, call_token_ids=(answer[1],), pause_s=300.0) == class_of(300.0)
    counters = again.driver.scheduler.ranks[0].counters()
    assert (counters["hints_pause_recorded"], counters["hints_pause_ignored"]) == (1, 0)


def test_an_answer_that_the_next_prompt_lacks_is_evicted_first() -> None:
    agent = Agent()
    agent.turn(0.0, num_tokens=12, agent="a")
    agent.prompt = [*PROMPT, *[9] * 12]
    agent.turn(8.0, agent="a")
    tree = agent.driver.scheduler.ranks[0].memory.cache.tree
    policy: Any = tree.policy
    policy._shadows.leading_policy, policy._shadows.has_changed = RETURN, True
    policy._follow(None)
    rest = policy.next_victim(tree.clock)
    assert rest.return_class == REPLACED
    assert rest.end > len(PROMPT)
    assert 9 not in rest.key
    policy._expect(rest, FIRST_CLASS)
    agent.now_s += 30.0  # both are expected after 60 s, and the rest was used first
    agent.driver.tick(agent.now_s)
    assert policy.next_victim(tree.clock) is rest
    kept = next(node for node in tree.nodes() if 9 in node.key and not node.children)
    policy._expect(kept, class_of(300.0))
    assert policy.next_victim(tree.clock) is kept


def test_nothing_is_recorded_of_other_traffic_or_with_the_switch_off() -> None:
    for agent, name in ((Agent(), ""), (Agent(radix_expected_return="off"), "a")):
        agent.turn(0.0, agent=name)
        agent.turn(8.0, agent=name)
        policy: Any = agent.driver.scheduler.ranks[0].memory.cache.tree.policy
        assert len(policy._records) == 0


def test_hints_are_counted_by_what_becomes_of_them() -> None:
    sent: tuple[dict[str, Any], ...] = (
        {"keep_s": 300.0},
        {"keep_s": 7200.0, "num_unknown_hints": 2},
        {"is_last": True, "pause_s": 8.0},
        {"num_unknown_hints": 1},
    )
    for state, outcome in (("on", "recorded"), ("off", "ignored")):
        agent = Agent(radix_expected_return=state)
        for reuse in sent:
            agent.turn(8.0, **reuse)
        rank = agent.driver.scheduler.ranks[0]
        counts = {name: n for name, n in rank.counters().items() if name.startswith("hints_") and n}
        retained = (
            {"retain_recorded": 1, "retain_capped": 1} if state == "on" else {"retain_ignored": 2}
        )
        others = {f"evict_{outcome}": 1, f"pause_{outcome}": 1, "unknown_ignored": 3}
        assert counts == {f"hints_{name}": n for name, n in (retained | others).items()}
    agent = Agent()
    agent.turn(0.0, num_unknown_hints=1)
    policy: Any = agent.driver.scheduler.ranks[0].memory.cache.tree.policy
    assert len(policy._records) == 0


def test_a_conversation_that_ends_releases_no_prompt_of_another_tenant() -> None:
    for other in ("b", "a"):
        driver = Agent().driver
        for rid, prompt, name, is_last in (
            ("1", PROMPT, other, False),
            ("2", [*PROMPT, *range(30, 39)], "a", True),
        ):
            tenant, reuse = Tenant(name=name), Reuse(is_last=is_last)
            driver.submit(generate(rid, prompt, 3, tenant=tenant, reuse=reuse, ignore_eos=True))
            driver.run()
        nodes = list(driver.scheduler.ranks[0].memory.cache.nodes())
        released = [node.end - len(node.key) for node in nodes if node.return_class == REPLACED]
        assert min(released) == (0 if other == "a" else len(PROMPT))


def test_a_request_that_its_client_leaves_records_nothing() -> None:
    agent = Agent()
    reuse = Reuse(agent="a", pause_s=8.0)
    agent.driver.submit(generate("left", PROMPT, 9, reuse=reuse, ignore_eos=True))
    for _ in range(4):
        agent.driver.step()
    agent.driver.abort("left")
    agent.driver.run()
    policy: Any = agent.driver.scheduler.ranks[0].memory.cache.tree.policy
    assert len(policy._records) == 0
    assert agent.driver.scheduler.ranks[0].counters()["hints_pause_ignored"] == 1


def test_the_forecast_of_a_request_that_was_retracted_is_counted_once() -> None:
    agent = Agent()
    reuse = Reuse(agent="a", pause_s=8.0)
    agent.driver.submit(generate("again", PROMPT, 9, reuse=reuse, ignore_eos=True))
    for _ in range(4):
        agent.driver.step()
    agent.driver.retract("again")
    agent.driver.run()
    counters = agent.driver.scheduler.ranks[0].counters()
    assert (counters["hints_pause_recorded"], counters["hints_pause_ignored"]) == (1, 0)


def test_a_long_answer_is_no_part_of_the_pause_after_it() -> None:
    """Even before any page is evicted, the time of an answer's end is known."""
    agent = Agent()
    driver, scheduler = agent.driver, agent.driver.scheduler
    driver.submit(generate("long", PROMPT, 40, reuse=Reuse(agent="a"), ignore_eos=True))
    while not scheduler.is_idle:
        driver.step()
        agent.now_s += 2.0
        if scheduler.needs_tick(agent.now_s):
            driver.tick(agent.now_s)
    agent.prompt = [*PROMPT, *driver.tokens["long"], 1, 2]
    took = agent.turn(8.0, agent="a")
    assert took == round(0.7 * FIRST_CLASS + 0.3 * class_of(8.0))
