"""The prefix tree next to its specification, for many steps of a plain random generator.

    python -m tests.mem_cache.random_trees 1000000 [FIRST_SEED]

runs so many steps, an equal part of each kind of tree, and prints steps, seconds and violations. A
step is one call of the tree by a lease, by eviction or for a cursor. After each, all that the tree
holds is compared with the model of its kind, and all counts, locks and lists are recounted; trees
with a host tier balance after each step, and are compared every 20. The seed decides the settings
and all events of a run.
"""

import random
import sys
import time
import traceback
from collections.abc import Callable
from itertools import count

from sgl_jax.mem_cache.eviction.eviction_policy import EVICTION_POLICIES
from tests.mem_cache.audit_once import AuditOnce
from tests.mem_cache.offload.test_offload_runs import GROUPS, POLICIES, HostRun
from tests.mem_cache.test_lookbacks import LookbackMachine
from tests.mem_cache.tree.test_radix_cache import RadixCacheMachine

STEPS_PER_RUN = 500
_MOST_VIOLATIONS = 10  # the rest of the steps is left out then
_AUDITS: dict[tuple[int, int], AuditOnce] = {}


class CountedTree(LookbackMachine):
    """Compared with the model after each chunk of a prompt, too; `num_steps` counts."""

    num_steps = 0

    def after_a_chunk(self) -> None:
        self.num_steps += 1
        self.agrees_with_the_model()


def run_full(rng: random.Random) -> int:
    """A tree of full attention, whose model also knows ages and uses."""
    machine = RadixCacheMachine()
    machine.page_size = rng.randint(1, 4)
    machine.eviction_policy = rng.choice(EVICTION_POLICIES)
    machine.start()
    most_pages = rng.choice([15, 30, 60])
    for _ in range(STEPS_PER_RUN):
        if len(machine.model.pages) > most_pages and rng.random() < 0.5:
            machine.evict(min(len(machine.model.pages) - most_pages, 12))
        else:
            machine.one_thing(rng)
        machine.agrees_with_the_model()
    machine.teardown()
    return STEPS_PER_RUN


def run_lookbacks(*layouts: int) -> Callable[[random.Random], int]:
    """A tree with one of these layouts of windows and states."""

    def run(rng: random.Random) -> int:
        layout, page_size = rng.choice(layouts), rng.randint(1, 4)
        machine = CountedTree()
        audit = _AUDITS.setdefault((layout, page_size), AuditOnce()).audit
        machine.begin(layout, page_size, rng.choice(EVICTION_POLICIES), audit)
        most_pages = rng.choice([15, 30, 60])
        while machine.num_steps < STEPS_PER_RUN:
            if len(machine.model.pages) > most_pages and rng.random() < 0.5:
                pool = rng.randrange(len(machine.allocators))
                machine.evict_from(pool, len(machine.model.pages) - most_pages)
            else:
                machine.one_thing(rng)
            machine.num_steps += 1
            machine.agrees_with_the_model()
        machine.teardown()
        return machine.num_steps

    return run


def run_host(rng: random.Random) -> int:
    """A rank's memory with blocks on the host and a store."""
    run = HostRun(rng.choice(list(GROUPS)), rng.choice(POLICIES), rng.randrange(2**32))
    run.run(STEPS_PER_RUN)
    return STEPS_PER_RUN


LAYOUTS = range(len(LookbackMachine.layouts))
KINDS: dict[str, Callable[[random.Random], int]] = {
    "full attention": run_full,
    "windows": run_lookbacks(*LAYOUTS[:8]),
    "states": run_lookbacks(8),
    "windows and states": run_lookbacks(9, 10),
    "host tier": run_host,
}


def main(num_steps: int, first_seed: int = 1) -> int:
    """Run the steps; returns the number of violations."""
    steps, seconds = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0)
    violations = 0
    for seed in count(first_seed):
        kinds = [kind for kind in KINDS if steps[kind] * len(KINDS) < num_steps]
        if not kinds or violations >= _MOST_VIOLATIONS:
            break
        for kind in kinds:
            started = time.process_time()
            try:
                steps[kind] += KINDS[kind](random.Random(f"{kind} {seed}"))
            except Exception:
                violations += 1
                steps[kind] += 1
                print(f"violation: {kind}, seed {seed}\n{traceback.format_exc()}", flush=True)
            seconds[kind] += time.process_time() - started
        if (seed - first_seed) % 20 == 19:
            report(steps, seconds, violations)
    report(steps, seconds, violations)
    return violations


def report(steps: dict[str, int], seconds: dict[str, float], violations: int) -> None:
    of_kinds = "; ".join(f"{kind} {steps[kind]} in {seconds[kind]:.0f} s" for kind in KINDS)
    print(f"{sum(steps.values())} steps, {violations} violations: {of_kinds}", flush=True)


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:])), 1))
