"""Engines of few shapes, since each shape is a program that takes a second to compile."""

from collections.abc import Iterator

import pytest

from sgl_jax.executor import buckets


@pytest.fixture(scope="module", autouse=True)
def few_shapes() -> Iterator[None]:
    """Pad steps to full batches and full chunks. `tests/executor` and the servers of `tests/live`
    have the shapes of users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_CPU_TOKENS", buckets._CPU_TOKENS[-1:])
        yield
