"""However a request ends, while others are being retracted, its memory comes back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.accuracy.endings import REQUEST_TIMEOUT_S, run_endings
from tests.accuracy.served_models import DENSE
from tests.accuracy.test_retract_accuracy import assert_sound
from tests.accuracy.variants import SOME, Variant
from tests.accuracy.workload import Outcome
from tests.live.live_server import WARM, live_server

ENDINGS = (
    *("end of sequence", "stop token", "stop string", "length"),
    *("abort", "disconnect", "error", "time-out"),
)


@pytest.mark.long
@pytest.mark.parametrize("variant", SOME, ids=lambda variant: variant.name)
def test_every_ending_gives_its_memory_back(
    variant: Variant, reference_of: Callable[..., Outcome], tmp_path: Path
) -> None:
    reference = reference_of(DENSE)
    # Compiled first: requests that wait for a program would run out of time.
    limit = ("--request-timeout", str(REQUEST_TIMEOUT_S), *WARM)
    flags = (*variant.flags, *variant.retract_flags, *limit)
    with live_server(tmp_path, *flags, is_quickly_compiled=True) as server:
        counts = run_endings(server.url, reference)
        print(counts)
        assert not [ending for ending in ENDINGS if not counts[ending]], counts
        assert_sound(server)
        counters = server.get("/get_server_info")["counters"]
        assert counters["requests_timed_out"] >= counts["time-out"]
        assert counters["requests_force_retracted"] > 0
