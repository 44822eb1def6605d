"""When the engine process looks for cyclic garbage: while nothing runs, not in the midst of steps.

Python does it after every few thousand new objects, and its longest searches look through all that
lives: with thousands of requests and sessions that holds up a step by tens of milliseconds, to
find nothing, since the scheduler and the memory stack make no cycles that are dropped. So here it
is done at rest. Under load that never rests it is done when so many more objects live than after
the last time that something may be piling up.
"""

import gc

# Tracked objects more than after the last collection: at rest, and between steps.
_MANY_AT_REST = 10_000
_MANY_UNDER_LOAD = 1_000_000


def take_over_collection() -> None:
    """From now on only `collect_if_many` collects.

    What lives now is never looked through again: it was built to live as long as the process.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_if_many(is_resting: bool) -> bool:
    """Collect if so many objects are new since the last time; called between steps. Whether it did.

    The interpreter counts new objects less those freed, whether or not it collects by itself.
    """
    if gc.get_count()[0] < (_MANY_AT_REST if is_resting else _MANY_UNDER_LOAD):
        return False
    gc.collect()
    return True
