"""The sizes of blocks, of tokens and of matrices, in the TPU's products over a ring."""

from itertools import count
from typing import NamedTuple

from sgl_jax.kernels.tpu_chip import LANES, most_vmem_bytes

_MAX_NUMBERS = 1 << 20  # of a matrix's block
_BUFFER_BYTES = 12 << 20  # of blocks on their way
_MAX_BUFFERS = 8
_OTHER_BYTES = 4 << 20  # of vector memory: norms, scales, registers that do not fit
_ROW_BYTES = LANES * 4  # of one number for each token
_MAX_TILE = 576  # tokens that are multiplied with a matrix's block at once, in whole units
_MAX_PIECE = 64  # tokens that are normalised or finished at once
_UNIT = 32  # tokens of a tile of memory, of one byte a number; fewer if numbers have more
_SUBLANES = _UNIT // 2  # the same, of two bytes


class TokenBlocks(NamedTuple):
    """Tokens, padded, in equal blocks, each in equal tiles."""

    number: int
    tiles: int  # of a block
    tile: int  # tokens

    @property
    def tokens(self) -> int:
        """The tokens of a block."""
        return self.tiles * self.tile

    @property
    def padded(self) -> int:
        """All tokens."""
        return self.number * self.tokens

    @classmethod
    def of(cls, num_tokens: int, token_bytes: int, kind: str) -> "TokenBlocks":
        """The fewest blocks whose tokens, of `token_bytes` each, lie in a chip's vector memory.

        Raises ValueError if it is too small for the fewest tokens that a block may have.
        """
        room = most_vmem_bytes(kind) - _BUFFER_BYTES - _OTHER_BYTES
        is_whole = num_tokens <= _MAX_PIECE or num_tokens % _SUBLANES == 0
        if is_whole and num_tokens <= _MAX_TILE and num_tokens * token_bytes <= room:
            return cls(1, 1, num_tokens)
        if _UNIT * token_bytes > room:
            raise ValueError(
                f"{_UNIT} tokens of {token_bytes:,} bytes each exceed {room:,} bytes of a {kind}'s "
                "vector memory; --hidden-sharding replicated needs less"
            )
        for number in count(1):
            tiles = -(-num_tokens // (number * _MAX_TILE))
            cut = cls(number, tiles, -(-num_tokens // (number * tiles * _UNIT)) * _UNIT)
            if cut.tokens * token_bytes <= room:
                break
        return cut


def gather_token_bytes(
    chips: int, columns: int, outputs: int, matrices: int, itemsize: int, result_itemsize: int
) -> int:
    """Vector memory for a token of a product that gathers, `outputs` of each of its matrices.

    Its columns of every chip, as they are multiplied, and as they arrive, twice; sums of each
    output, and two results; and its squares, or twice its scale.
    """
    gathered = (chips + 3) * columns * itemsize
    return gathered + outputs * (4 * matrices + 2 * result_itemsize) + 2 * _ROW_BYTES


def scatter_token_bytes(
    chips: int, columns: int, inputs: int, itemsize: int, result_itemsize: int
) -> int:
    """The same for a product that scatters.

    Its inputs, twice; columns to and from every chip, and zeros; the residual and the result,
    twice; the sums for one chip; and twice its scale.
    """
    scattered = (2 * chips + 5) * columns * result_itemsize
    return 2 * inputs * itemsize + scattered + columns * 4 + 2 * _ROW_BYTES


def piece(num_tokens: int) -> int:
    """The part of so many tokens whose numbers fit into registers, a few of each at a time."""
    sizes = range(_SUBLANES, _MAX_PIECE + 1, _SUBLANES)
    return max((size for size in sizes if num_tokens % size == 0), default=num_tokens)


def is_split(chips: int, num_tokens: int, itemsize: int) -> bool:
    """True if messages to the chip opposite are cut in two, into whole tiles of memory."""
    return chips % 2 == 0 and num_tokens % (2 * _UNIT // itemsize) == 0


def block_width(size: int, columns: int, number_bytes: int) -> int:
    """The part of `size` outputs or inputs that makes a block with `columns` hidden states.

    `number_bytes` are of a number in all matrices together; there is room for two blocks.
    """
    most = min(_MAX_NUMBERS // columns, _BUFFER_BYTES // (2 * columns * number_bytes))
    sizes = range(LANES, max(most, LANES) + 1, LANES)
    return max(own for own in sizes if size % own == 0)


def num_buffers(block_bytes: int, num_blocks: int) -> int:
    """Blocks of matrices that are on their way at once."""
    return min(max(_BUFFER_BYTES // block_bytes, 2), _MAX_BUFFERS, num_blocks)
