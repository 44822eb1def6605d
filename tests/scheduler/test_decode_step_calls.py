"""A step in which every request decodes is planned by few functions, which can all be read."""

import sys
from types import FrameType
from typing import Any

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import PlanStep
from tests.scheduler.driver import Driver, generate, make_sizes

MOST = 28


def test_a_decode_step_is_planned_by_few_functions() -> None:
    sizes = make_sizes(dp_size=2, page_size=64, num_rows=5, num_pages=40)  # no row needs a page
    driver = Driver(sizes, SchedulerArgs(), overlap=False)
    for number in range(8):
        driver.submit(generate(f"r{number}", [number] * 20, 100))
    for _ in range(10):
        driver.step()
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Comprehensions are frames of their own in some versions of Python.
        if event == "call" and "sgl_jax" in code.co_filename and "<" not in code.co_name:
            called.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    plan = driver.scheduler.handle(PlanStep())
    sys.setprofile(None)
    assert plan is not None
    assert sum(len(rank_plan.rows) for rank_plan in plan.ranks) == 8
    assert len(called) <= MOST, "\n".join(name for _, name in sorted(called))
