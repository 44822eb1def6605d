"""Every question about sessions has one row in the table of calls, and a handler in the engine."""

import typing

from sgl_jax.core.messages import SessionMessage
from sgl_jax.server.api_keys import ANONYMOUS
from sgl_jax.server.session_owner import SessionOwner
from sgl_jax.server.session_routes import CALLS
from tests.scheduler.driver import Driver, make_sizes

ARGUMENTS = {
    "session_id": "s",
    "new_session_id": "t",
    "num_turns": 0,
}


def test_each_message_has_one_call_and_each_call_its_message() -> None:
    assert {call.message for call in CALLS} == set(typing.get_args(SessionMessage))
    assert (
        len({call.message for call in CALLS}) == len({call.route for call in CALLS}) == len(CALLS)
    )
    for call in CALLS:
        fields = {k: v for k, v in ARGUMENTS.items() if k in call.body.model_fields}
        assert type(call.body(**fields).to_message(SessionOwner(ANONYMOUS))) is call.message


def test_the_engine_answers_each_of_them() -> None:
    driver = Driver(make_sizes(num_pages=20))
    for call in CALLS:
        fields = {k: v for k, v in ARGUMENTS.items() if k in call.body.model_fields}
        reply = driver.session(call.body(**fields).to_message(SessionOwner(ANONYMOUS)))
        assert reply.ok or "session" in reply.message, call.route
