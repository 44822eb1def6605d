"""The state machines of this room with many more events; `SGL_JAX_EXAMPLES` sets how many."""

import os
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.tree_node import TreeNode
from tests.mem_cache.audit_once import AuditOnce
from tests.mem_cache.eviction.test_eviction_queue import QueueMachine
from tests.mem_cache.pages.test_page_allocator import AllocatorMachine
from tests.mem_cache.pages.test_req_to_token_pool import RowMachine
from tests.mem_cache.random_trees import KINDS, STEPS_PER_RUN, main
from tests.mem_cache.test_lookbacks import LookbackMachine
from tests.mem_cache.test_release import LeaseMachine
from tests.mem_cache.test_session_lease_machine import SessionLeaseMachine
from tests.mem_cache.tree.test_radix_cache import (
    AdaptiveRadixCacheMachine,
    PagedRadixCacheMachine,
    RadixCacheMachine,
)
from tests.support.long import long_but

MACHINES = [
    QueueMachine,
    AllocatorMachine,
    RowMachine,
    RadixCacheMachine,
    PagedRadixCacheMachine,
    AdaptiveRadixCacheMachine,
    LookbackMachine,
    LeaseMachine,
    SessionLeaseMachine,
]


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", MACHINES)
def test_many_random_events(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("SGL_JAX_EXAMPLES", "300")),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("kind", long_but(KINDS, "full attention", "windows and states"))
def test_some_steps_of_each_kind_of_tree(kind: str) -> None:
    assert KINDS[kind](random.Random(kind)) >= STEPS_PER_RUN


@pytest.mark.long
@pytest.mark.timeout(14400)
def test_a_million_steps_of_trees_break_no_invariant() -> None:
    """`SGL_JAX_STEPS` of them over all kinds."""
    assert main(int(os.environ.get("SGL_JAX_STEPS", "1000000"))) == 0


def lock_once_more(machine: LookbackMachine, node: TreeNode) -> None:
    node.locks[1][-1] += 1


def turn_a_position(machine: LookbackMachine, node: TreeNode) -> None:
    node.is_usable[-1] ^= True


def count_a_page(machine: LookbackMachine, node: TreeNode) -> None:
    machine.cache.tree.components[1].num_evictable += 1


def end_its_run(machine: LookbackMachine, node: TreeNode) -> None:
    node.runs = (node.runs[0] + 1,)


def list_it_once_more(machine: LookbackMachine, node: TreeNode) -> None:
    order = machine.cache.tree.components[1].order  # type: ignore[attr-defined]
    number = node.num_uses
    free = [each for each in order._queues if node.node_id not in each[number].members]
    free[0][number].add(node.read)


@pytest.mark.parametrize(
    "damage", [lock_once_more, turn_a_position, count_a_page, end_its_run, list_it_once_more]
)
def test_the_audit_of_long_runs_finds_damage_to_a_state_found_right_before(
    damage: Callable[[LookbackMachine, TreeNode], None],
) -> None:
    machine, rng, audit = LookbackMachine(), random.Random(5), AuditOnce()
    machine.begin(0, 1, "adaptive", audit.audit)
    for _ in range(60):
        machine.one_thing(rng)
        machine.agrees_with_the_model()
    machine.agrees_with_the_model()
    damage(machine, next(machine.cache.tree.nodes()))
    with pytest.raises((AssertionError, LedgerError)):
        machine.agrees_with_the_model()
