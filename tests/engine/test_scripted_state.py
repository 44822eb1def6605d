"""The scripted engine of the server's tests shows its ranks with the real scheduler's fields."""

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.ranks import Ranks
from tests.engine.scripted_engine import ScriptedEngine
from tests.scheduler.driver import make_sizes


def test_scripted_ranks_have_all_fields_of_real_ones() -> None:
    (real,) = Ranks(make_sizes(), SchedulerArgs()).states()
    for scripted in ScriptedEngine().state()["ranks"]:
        assert set(real) <= set(scripted)
        assert set(real["counters"]) == set(scripted["counters"])
        assert [set(pool) for pool in real["pools"]] == [set(pool) for pool in scripted["pools"]]
