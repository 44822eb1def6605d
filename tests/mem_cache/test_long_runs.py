"""The state machines of this room with many more events; `SGL_JAX_EXAMPLES` sets how many."""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.mem_cache.test_eviction_queue import QueueMachine
from tests.mem_cache.test_lookbacks import LookbackMachine
from tests.mem_cache.test_page_allocator import AllocatorMachine
from tests.mem_cache.test_radix_cache import (
    AdaptiveRadixCacheMachine,
    PagedRadixCacheMachine,
    RadixCacheMachine,
)
from tests.mem_cache.test_release import LeaseMachine
from tests.mem_cache.test_req_to_token_pool import RowMachine
from tests.mem_cache.test_session_lease_machine import SessionLeaseMachine

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
            max_examples=int(os.environ.get("SGL_JAX_EXAMPLES", "3000")),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
