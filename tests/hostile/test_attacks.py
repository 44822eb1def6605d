"""No request freezes the server, fills its memory, or makes it answer with a defect."""

import pytest

from tests.hostile.attacks import NAMED, QUICK, Attack, name_of, resist
from tests.hostile.hostile_server import HostileServer


@pytest.mark.parametrize("attack", NAMED, ids=name_of)
def test_what_froze_it_does_so_no_more(server: HostileServer, attack: Attack) -> None:
    resist(server, attack)


@pytest.mark.parametrize("attack", QUICK, ids=name_of)
def test_what_is_no_request_harms_no_one(server: HostileServer, attack: Attack) -> None:
    resist(server, attack)
