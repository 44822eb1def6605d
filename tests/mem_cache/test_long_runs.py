"""The state machines of this room with many more events; `SGL_JAX_EXAMPLES` sets how many."""

import itertools
import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from sgl_jax.mem_cache.eviction.eviction_policy import EVICTION_POLICIES
from tests.mem_cache.eviction.test_eviction_queue import QueueMachine
from tests.mem_cache.pages.test_page_allocator import AllocatorMachine
from tests.mem_cache.pages.test_req_to_token_pool import RowMachine
from tests.mem_cache.test_lookbacks import LookbackMachine, run_at_random
from tests.mem_cache.test_release import LeaseMachine
from tests.mem_cache.test_session_lease_machine import SessionLeaseMachine
from tests.mem_cache.tree.test_radix_cache import (
    AdaptiveRadixCacheMachine,
    PagedRadixCacheMachine,
    RadixCacheMachine,
)

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


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", range(len(LookbackMachine.layouts)))
def test_many_things_on_trees_with_windows(layout: int) -> None:
    """`SGL_JAX_STEPS` of them over all cases; after each, everything is compared with the model."""
    kinds = list(itertools.product([1, 2, 3, 4], EVICTION_POLICIES))
    num_runs = len(LookbackMachine.layouts) * len(kinds)
    for page_size, policy in kinds:
        run_at_random(
            layout, page_size, policy, int(os.environ.get("SGL_JAX_STEPS", "100000")) // num_runs
        )
