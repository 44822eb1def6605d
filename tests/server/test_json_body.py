"""What a body holds is counted before it is decoded, and counted right."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.server.answer_stream import json_response
from sgl_jax.server.errors import ApiError, install_error_handlers
from sgl_jax.server.guards import bodies
from sgl_jax.server.guards.bodies import JsonRoute, check_shape
from sgl_jax.server.guards.limits import Limits
from tests.support.long import long

SCALARS = st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\,:[]{}/\n é😀')
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text('k"\\:,[', max_size=3), inner)
    ),
    max_leaves=30,
)


@pytest.fixture(scope="module", autouse=True, params=[1, *long(2, 3), 7, 2**20])
def slices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Slices so small that every kind of byte is at the end of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_SLICE_BYTES", request.param)
        yield


def walk(value: Any) -> tuple[int, int, int]:
    """Depth, commas; keys, lists and objects."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = list(value.values() if isinstance(value, dict) else value)
    below = [walk(each) for each in inner]
    depth = 1 + max((each[0] for each in below), default=0)
    commas = max(len(inner) - 1, 0) + sum(each[1] for each in below)
    keys = 1 + (len(value) if isinstance(value, dict) else 0) + sum(each[2] for each in below)
    return depth, commas, keys


@settings(max_examples=60, deadline=None)
@given(VALUES, st.booleans())
def test_exactly_what_the_limits_allow_passes(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    depth, values, keys = walk(value)
    limits = replace(Limits(), max_json_depth=depth, max_json_values=values, max_json_keys=keys)
    check_shape(body, limits)
    for name, count in (("depth", depth), ("values", values), ("keys", keys)):
        if count:
            with pytest.raises(ApiError) as caught:
                check_shape(body, replace(limits, **{f"max_json_{name}": count - 1}))
            assert caught.value.status_code == 400
            assert caught.value.code == "too_complex"


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=50) | st.text('"\\[]{},:', max_size=50).map(str.encode))
def test_what_is_no_json_is_left_to_the_decoder(body: bytes) -> None:
    check_shape(body, Limits())


class Body(BaseModel):
    """Remembers the threads that validated it."""

    items: list[int]
    threads: ClassVar[list[str]] = []

    @model_validator(mode="before")
    @classmethod
    def _note_thread(cls, body: Any) -> Any:
        if isinstance(body, dict):
            cls.threads.append(threading.current_thread().name)
        return body


@pytest.mark.anyio
@pytest.mark.parametrize(("num_items", "thread"), [(1_000, "MainThread"), (40_000, "json")])
async def test_a_long_body_is_validated_once_and_beside_the_loop(
    num_items: int, thread: str
) -> None:
    app = FastAPI()
    app.state.limits = Limits()
    app.state.references = SimpleNamespace(args=ServerArgs())
    install_error_handlers(app)
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/sum")
    async def add(body: Body, request: Request) -> Response:
        return json_response(sum(body.items))

    app.include_router(routes)
    Body.threads.clear()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.post("/sum", json={"items": [2] * num_items})
        assert answer.json() == 2 * num_items
        assert [name.rstrip("_0123456789") for name in Body.threads] == [thread]
        wrong = await http.post("/sum", json={"items": [2] * num_items + ["x"]})
        error = wrong.json()["error"]
        assert wrong.status_code == 400
        assert (error["param"], error["code"]) == (f"items[{num_items}]", "invalid_value")
        assert "unable to parse string as an integer" in error["message"]
