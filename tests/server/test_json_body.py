"""What a body holds is counted before it is decoded, and counted right."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_jax.server import json_body
from sgl_jax.server.errors import ApiError
from sgl_jax.server.json_body import check_shape
from sgl_jax.server.limits import Limits

SCALARS = st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\,:[]{}/\n é😀')
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text('k"\\:,[', max_size=3), inner)
    ),
    max_leaves=30,
)


@pytest.fixture(scope="module", autouse=True, params=[1, 2, 3, 7, 2**20])
def slices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Slices so small that every kind of byte is at the end of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_SLICE_BYTES", request.param)
        yield


def walk(value: Any) -> tuple[int, int, int]:
    """Depth, commas, and keys and lists."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = list(value.values() if isinstance(value, dict) else value)
    below = [walk(each) for each in inner]
    depth = 1 + max((each[0] for each in below), default=0)
    commas = max(len(inner) - 1, 0) + sum(each[1] for each in below)
    keys = (len(value) if isinstance(value, dict) else 1) + sum(each[2] for each in below)
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
