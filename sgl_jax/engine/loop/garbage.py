"""Python's garbage collection: in the engine process while it is idle, not between steps.

By default, Python collects after every few thousand new objects, and a full collection visits all
objects. With thousands of requests and sessions this delays a step by tens of milliseconds, and
finds nothing, since the scheduler and the memory stack drop no cycles. So the engine collects while
it is idle. Under constant load it collects only after so many new objects that other code's cycles
may have piled up.

The server's process has no idle moment to wait for. There a collection is due after so many new
objects that one answer with log-probabilities, thousands of them, makes none due.
"""

import gc

# New objects since the last collection that make the next one due: while idle, and under load.
_MANY_AT_REST = 10_000
_MANY_UNDER_LOAD = 1_000_000
# In the server's process.
_MANY_OF_ANSWERS = 50_000


def take_over_collection() -> None:
    """Switch automatic collection off; from now on only `collect_if_many` collects.

    Objects that exist now are exempt from collection, and stay until the process ends.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_if_many(is_resting: bool) -> bool:
    """Collect if there are many new objects since the last collection; returns True if it did."""
    # The interpreter counts new objects minus freed ones also if automatic collection is off.
    if gc.get_count()[0] < (_MANY_AT_REST if is_resting else _MANY_UNDER_LOAD):
        return False
    gc.collect()
    return True


def collect_seldom() -> None:
    """Exempt the objects that exist now from collection, and collect after many new ones only."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MANY_OF_ANSWERS)
