"""The scheduler's state machine run by a plain random generator: more steps a second.

Hypothesis draws short runs and finds the shortest that fails; these are long, so that queues fill,
requests become due, and caches turn over many times. All invariants of the machine hold after each
step, liveness among them. A run is its seed: `python -m tests.scheduler.random_runs FIRST LAST`
runs those seeds and prints what they met; `... FIRST LAST sessions` has conversations among the
requests, `... FIRST LAST glitches` has rows whose results are not finite, and with `... FIRST LAST
thrashing` each rank takes most evicted pages to return.
"""

import random
import sys
import time
from collections import Counter
from dataclasses import replace

from tests.scheduler.liveness import ThrashingSet
from tests.scheduler.setups import HOSTS, PRIORITIES, SHAPES, WINDOWS, Setup
from tests.scheduler.test_state_machine import NAMESPACES, SchedulerMachine
from tests.sessions.test_session_machine import MAX_SESSIONS, SessionMachine

STEPS_PER_RUN = 400


def draw_setup(rng: random.Random) -> Setup:
    """What a run without conversations begins with."""
    return Setup(
        dp_size=rng.randint(1, 4),
        page_size=rng.choice([1, 4, 16]),
        pool_tokens=rng.choice([48, 80, 128, 256]),
        num_rows=rng.randint(3, 9),
        chunk=rng.choice([1, 3, 8, 16, 64]),
        max_unread=rng.randint(0, 2),
        radix=rng.random() < 0.8,
        policy=rng.choice(["fcfs", "lpm"]),
        balance=rng.choice(["prefix_aware", "prefix_aware", "round_robin"]),
        conservativeness=rng.choice([0.0, 0.3, 1.0, 10.0]),
        num_draft_tokens=rng.choice([0, 0, 1, 3, 4]),
        shapes=rng.choice(SHAPES),
        retract_interval=rng.choice([0, 0, 0, 0, 2, 3, 5]),
        no_prefill_bs=rng.choice([0, 0, 0, 1, 2, 5]),
        is_replayed=False,
        timeouts_s=rng.choice([(0.0, 0.0), (0.0, 0.0), (5.0, 0.0), (4.0, 8.0)]),
        priorities=rng.choice(PRIORITIES),
        threshold=rng.choice([0, 10]),
        max_skip_count=rng.choice([1, 3, 128]),
        eviction=rng.choice(["adaptive", "adaptive", "lru"]),
        windows=rng.choice([None, (rng.choice(WINDOWS), rng.randint(2, 40))]),
        states=rng.choice([None, (rng.randint(1, 24), rng.randint(1, 4), rng.randint(1, 2))]),
        aging_s=rng.choice([0.0, 0.0, 0.5, 30.0]),
        num_tenants=rng.randint(0, 4),
        is_fair=rng.random() < 0.5,
        host=rng.choice([None, *HOSTS]),
    )


def draw_session_setup(rng: random.Random) -> Setup:
    """What a run with conversations begins with."""
    return replace(
        draw_setup(rng),
        no_prefill_bs=0,
        threshold=0,
        eviction="adaptive",
        page_size=rng.choice([1, 4, 16, 256]),
        session_memory_fraction=rng.choice([1.0, 1.0, 0.5, 0.0]),
        max_sessions=MAX_SESSIONS,
    )


def talk(machine: SessionMachine, rng: random.Random) -> None:
    """Something that clients of sessions do."""
    dice = rng.random()
    if dice < 0.6:
        machine.turns(rng.randrange(2**32), rng.randint(1, 5))
    elif dice < 0.8:
        machine.turns_of_trees(rng.randrange(2**32), rng.randint(1, 4))
    elif dice < 0.9:
        machine.amend(rng.randrange(2**32), rng.randint(1, 3))
    elif dice < 0.95:
        machine.evict(rng.randint(0, 3))
    else:
        machine.open(is_timed=rng.random() < 0.5, namespace=rng.choice(NAMESPACES))


def run(
    seed: int,
    *,
    with_sessions: bool = False,
    with_glitches: bool = False,
    is_thrashing: bool = False,
    num_steps: int = STEPS_PER_RUN,
) -> tuple[int, Counter[str]]:
    """One run to its end; the steps planned, and what was found waiting for what, and retracted."""
    rng = random.Random(seed)
    machine = SessionMachine() if with_sessions else SchedulerMachine()
    machine.audit_interval = 16
    machine.start((draw_session_setup if with_sessions else draw_setup)(rng))
    machine.liveness.check_interval = 5
    if is_thrashing:
        for rank in machine.driver.scheduler.ranks:
            rank.working_set = ThrashingSet(rank.memory, 30.0, is_on=rank.host.tier is None)
    load = rng.choice([0.05, 0.15, 0.4])  # how often requests come, against steps
    glitches = random.Random(seed)  # apart, so that all else is drawn as without them
    while len(machine.driver.plans) < num_steps:
        if with_glitches and glitches.random() < 0.01:
            machine.a_row_will_not_be_finite(glitches.randint(0, 60))
        dice = rng.random()
        if isinstance(machine, SessionMachine) and dice < load:
            talk(machine, rng)
        elif dice < load:
            machine.submit(rng.randrange(2**32), rng.randint(1, 8))
        elif dice < load + 0.03 and machine.live():
            machine.driver.abort(rng.choice(machine.live()))
        elif dice < load + 0.05:
            machine.time_goes_on(6 * rng.random())
        elif dice < load + 0.065:
            mode = rng.choice(["abort", "retract", "retract", "in_place"])
            machine.pause(mode, rng.randrange(2**32), rng.random() < 0.5)
        elif dice < load + 0.075:
            machine.steps_while_a_rank_gets_no_pages(rng.randint(0, 3), rng.randint(1, 3))
        elif machine.driver.scheduler.is_idle:
            machine.submit(rng.randrange(2**32), rng.randint(1, 8))
        else:
            machine.step(rng.randint(1, 12))
        if isinstance(machine, SessionMachine):
            machine.sessions_remember()
    machine.driver.run(max_steps=50_000)
    met = Counter(machine.liveness.num_waits)
    counters = machine.driver.scheduler.counters()
    for name in ("requests_retracted", "requests_preempted", "evicted_pages", "nonfinite_rows"):
        met[name] = counters[name]
    return len(machine.driver.plans), met


def main(first: int, last: int, **settings: bool) -> int:
    """Run the seeds from `first` to `last`; returns the steps planned."""
    started, total = time.monotonic(), 0
    met: Counter[str] = Counter()
    for seed in range(first, last + 1):
        try:
            num_steps, more = run(seed, **settings)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        total += num_steps
        met += more
        if seed % 100 == 0:
            print(f"seed {seed}: {total} steps, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{total} steps, 0 violations, {time.monotonic() - started:.0f} s; met {dict(met)}")
    return total


if __name__ == "__main__":
    has = sys.argv[3:]
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        with_sessions="sessions" in has,
        with_glitches="glitches" in has,
        is_thrashing="thrashing" in has,
    )
