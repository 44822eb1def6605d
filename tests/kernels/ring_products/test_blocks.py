"""Blocks of tokens and of matrices have whole tiles, and lie in vector memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.kernels.ring_products import blocks
from sgl_jax.kernels.ring_products.blocks import TokenBlocks, block_width, num_buffers, piece
from sgl_jax.kernels.tpu_chip import most_vmem_bytes

KINDS = ("TPU v5 lite", "TPU v6 lite", "TPU v5", "TPU7x")


@given(st.integers(1, 20_000), st.integers(1, 1_000_000), st.sampled_from(KINDS))
def test_blocks_have_all_tokens_and_lie_in_vector_memory(num_tokens, token_bytes, kind):
    cut = TokenBlocks.of(num_tokens, token_bytes, kind)
    buffers = blocks._BUFFER_BYTES + blocks._OTHER_BYTES
    assert cut.tokens * token_bytes + buffers <= most_vmem_bytes(kind)
    assert num_tokens <= cut.padded
    assert cut.tile <= blocks._MAX_TILE
    if cut != (1, 1, num_tokens):
        assert cut.tile % 32 == 0
        # No whole tile of each block is padding.
        assert cut.padded - num_tokens < 32 * cut.number * cut.tiles


@pytest.mark.parametrize(
    ("num_tokens", "token_bytes", "wanted"),
    [
        (128, 60_000, (1, 1, 128)),
        (7, 60_000, (1, 1, 7)),
        (100, 60_000, (1, 1, 128)),  # no whole tiles
        (2176, 60_000, (2, 2, 544)),
        (4096, 73_000, (4, 2, 512)),  # three would be padded to more than there is room for
    ],
)
def test_there_are_as_few_blocks_as_fit(num_tokens, token_bytes, wanted):
    assert TokenBlocks.of(num_tokens, token_bytes, "TPU v6 lite") == wanted


def test_a_token_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="hidden-sharding replicated"):
        TokenBlocks.of(100, 2_000_000, "TPU7x")


@given(st.integers(1, 5000))
def test_pieces_are_equal_parts(num_tokens):
    size = piece(num_tokens)
    assert num_tokens % size == 0
    assert size <= 64 or size == num_tokens


@pytest.mark.parametrize(("count", "itemsize"), [(1, 1), (1, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize(("size", "columns"), [(3584, 1024), (6400, 640), (14_336, 4096)])
def test_two_blocks_of_matrices_have_room(size, columns, count, itemsize):
    width = block_width(size, columns, count * itemsize)
    assert size % width == width % 128 == 0
    block = columns * width * count * itemsize
    assert num_buffers(block, 100) * block <= blocks._BUFFER_BYTES
