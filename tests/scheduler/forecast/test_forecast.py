"""The forecast of the pages that running requests will hold."""

import numpy as np
import pytest

from sgl_jax.scheduler.forecast.capacity import ROOM
from sgl_jax.scheduler.forecast.forecast import _NEEDS, _write


@pytest.mark.parametrize(("num_listed", "num_in_use"), [(25, 7), (29, 15), (60, 43), (100, 57)])
def test_a_forecast_is_no_more_than_requests_may_hold(num_listed: int, num_in_use: int) -> None:
    """However parts of shared pages are rounded: else one that fits exactly does not start."""
    needs, room = np.zeros(1, _NEEDS), np.zeros(1, ROOM)
    needs["held"] = num_listed
    needs["mean_a"] = needs["most_a"] = num_listed  # all run on, and none grows
    room["conservativeness"] = 1.0
    _write(needs, num_in_use, room)
    assert int(room["most"][0]) == num_in_use
    assert room["pages"].max() <= num_in_use
