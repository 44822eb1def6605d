"""When the engine process looks for cyclic garbage: while nothing runs, not in the midst of steps.

Python does it after every few thousand new objects, and its longest searches look through all
objects: with thousands of requests and sessions that holds up a step by tens of milliseconds, to
find nothing, since the scheduler and the memory stack make no cycles that are dropped. So here it
is done at rest. Under load without a rest it is done when there are so many more objects than
after the last time that cycles may be piling up.
"""

import gc

# Tracked objects more than after the last collection: at rest, and between steps.
_MANY_AT_REST = 10_000
_MANY_UNDER_LOAD = 1_000_000


def take_over_collection() -> None:
    """From now on only `collect_if_many` collects.

    Objects that exist now are exempt from collection: they are kept as long as the process runs.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_if_many(is_resting: bool) -> bool:
    """Collect if so many objects are new since the last time, between steps; True if it did.

    The interpreter counts new objects less those freed, whether or not it collects by itself.
    """
    if gc.get_count()[0] < (_MANY_AT_REST if is_resting else _MANY_UNDER_LOAD):
        return False
    gc.collect()
    return True
