"""The state machines of scheduler and sessions, run as their tests run them, once for each seed.

`python -m tests.scheduler.seeded_machines FIRST LAST` runs both with each of those seeds, and stops
at the first failure with the smallest case, the seed and a recording.
"""

import sys
import tempfile
import time
from pathlib import Path

from tests.scheduler.test_state_machine import OPTIONS, SchedulerMachine, run_machine
from tests.sessions.test_session_machine import OPTIONS as SESSION_OPTIONS
from tests.sessions.test_session_machine import SessionMachine


def main(first: int, last: int) -> None:
    """Run the seeds from `first` to `last`."""
    started, num_steps = time.monotonic(), 0
    for number in range(first, last + 1):
        for kind, options in ((SchedulerMachine, OPTIONS), (SessionMachine, SESSION_OPTIONS)):
            folder = Path(tempfile.mkdtemp())
            try:
                num_steps += run_machine(folder, kind, random_seed=number, database=None, **options)
            except BaseException as error:
                error.add_note(f"{kind.__name__}, seed {number}")
                raise
            folder.rmdir()
        elapsed_s = time.monotonic() - started
        print(f"seed {number}: {num_steps} steps, 0 failures, {elapsed_s:.0f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
