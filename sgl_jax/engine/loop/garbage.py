"""Controls Python's garbage collection, so that it runs while the engine is idle.

By default, Python collects after every few thousand new objects, and a full collection visits all
objects. With thousands of requests and sessions this delays a step by tens of milliseconds and
finds nothing, because the scheduler and the memory stack create no garbage cycles. Under constant
load the engine collects only after enough new objects that cycles of other code may have
accumulated.

The server process has no reliable idle time. Its threshold is high enough that one reply with
log-probabilities (thousands of objects) triggers no collection.
"""

import gc

# New objects since the last collection that trigger the next one: while idle, and under load.
_MANY_AT_REST = 10_000
_MANY_UNDER_LOAD = 1_000_000
# In the server process.
_MANY_OF_ANSWERS = 50_000


def schedule_collection() -> None:
    """Disable automatic collection, so that only `collect_if_many` collects.

    Existing objects are exempt from collection and stay until the process ends.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_if_many(is_resting: bool) -> bool:
    """Collect if there are many new objects since the last collection. Return True if it did."""
    # The interpreter also counts allocations minus frees while automatic collection is off.
    if gc.get_count()[0] < (_MANY_AT_REST if is_resting else _MANY_UNDER_LOAD):
        return False
    gc.collect()
    return True


def collect_seldom() -> None:
    """Exempt existing objects from collection, and collect only after many new objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MANY_OF_ANSWERS)
