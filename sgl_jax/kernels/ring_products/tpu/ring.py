"""A ring of chips that send messages to both neighbours, and blocks of matrices on their way.

Messages are numbered by their distance: message k goes (k + 1) // 2 chips, to the right if k is
odd, else to the left; 0 stays. To the chip opposite, one half goes on either side. Every message
of a call has a place of its own in the receiver's vector memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.ring_products.blocks import is_split
from sgl_jax.kernels.tpu_chip import LANES


class Ring(NamedTuple):
    """The chips along a mesh axis, and the parts, by tokens, of each message between them."""

    axis: str
    parts: int

    @classmethod
    def of(cls, axis: str, num_tokens: int, itemsize: int) -> "Ring":
        """In two parts if a chip lies opposite: one of them goes to it on each side."""
        return cls(axis, 2 if is_split(lax.axis_size(axis), num_tokens, itemsize) else 1)

    @property
    def chips(self) -> int:
        return lax.axis_size(self.axis)

    def at(self, offset: Any) -> jax.Array:
        """The place of the chip so far to the right of this one."""
        return lax.rem(lax.axis_index(self.axis) + offset + self.chips, self.chips)

    def places(self, num_tokens: int, width: int, dtype: Any, more: int = 0) -> Any:
        """Vector memory for a message of each number, and some more."""
        return pltpu.VMEM((self.chips + more, self.parts, num_tokens // self.parts, width), dtype)

    def semaphores(self) -> list[Any]:
        """For messages sent and received."""
        return [pltpu.SemaphoreType.DMA((self.chips, self.parts))] * 2

    def signal_neighbours(self) -> None:
        """Announce that messages may come; `wait_for_neighbours` waits until they may go."""
        barrier = pltpu.get_barrier_semaphore()
        for offset in (-1, 1):
            pl.semaphore_signal(barrier, device_id={self.axis: self.at(offset)})

    def wait_for_neighbours(self) -> None:
        pl.semaphore_wait(pltpu.get_barrier_semaphore(), 2)

    def message(self, k: Any, part: int, source: Any, places: Any, sent: Any, received: Any) -> Any:
        """The copy of a part of `source` [parts, ...] to place k of the next chip on its way."""
        turns_back = self._is_split(part) & (k == self.chips - 1)
        direction = jnp.where(turns_back, -1, _direction(k))
        return pltpu.make_async_remote_copy(
            *(source.at[part], places.at[k, part], sent.at[k, part], received.at[k, part]),
            device_id={self.axis: self.at(direction)},
        )

    def nexts(self, k: Any, part: int) -> list[tuple[Any, Any]]:
        """The messages whose way leads on from place k for one part, each with its condition."""
        last, is_split = self.chips - 1, self._is_split(part)
        end = last if is_split else self.chips
        found = [(k + 2 < end, k + 2), ((k == 0) & (end > 1), 1)]
        return [*found, (k == last - 1, last)] if is_split else found

    def place_before(self, k: Any, part: int) -> Any:
        """The place of the message that goes on as message k for one part; `chips` if none does."""
        before: Any = self.chips
        for is_next, place in self.nexts(k, part):
            before = jnp.where(is_next, place, before)
        return before

    def for_each_next(self, k: Any, part: int, do: Callable[[Any, int], None]) -> None:
        """do(message, part) for each of `nexts`."""
        for is_next, message in self.nexts(k, part):
            pl.when(is_next)(partial(do, message, part))

    def all_messages(self) -> list[tuple[int, int]]:
        return [(k, part) for k in range(1, self.chips) for part in range(self.parts)]

    def _is_split(self, part: int) -> bool:
        """True for the part of the last message that goes to the left."""
        return part == 1


def _direction(k: Any) -> Any:
    return 2 * lax.rem(k, 2) - 1


def distance(k: Any) -> Any:
    """Chips to the right that message k goes."""
    return _direction(k) * lax.div(k + 1, 2)


class Stream(NamedTuple):
    """The blocks of matrices [layers, ...] in the order of their use, in turns of buffers.

    Each block of tokens uses all of them, some for each chip of the ring, one chip after the other.
    """

    layer: Any
    matrices: Any
    buffers: Any  # [turns, matrices, rows, columns]
    arrived: Any  # DMA semaphores [turns]
    corner: Any  # of a chip's place in that order and one of its blocks: first row and column
    chips: int
    each: int  # blocks of a chip
    token_block: Any
    num_token_blocks: int

    def start_first(self) -> None:
        """Fill all buffers, before the first block of tokens."""

        @pl.when(self.token_block == 0)
        def _() -> None:
            for block in range(self.buffers.shape[0]):
                self._start(block)

    def for_each(self, chip: Any, use: Callable[[Any, Any], None]) -> None:
        """use(n, its buffer [matrices, rows, columns]) for the blocks of a chip by its place."""
        first = (self.token_block * self.chips + chip) * self.each

        @pl.loop(0, self.each)
        def _(n: Any) -> None:
            block = first + n
            for copy in self._copies(block):
                copy.wait()
            use(n, self.buffers.at[lax.rem(block, self.buffers.shape[0])])
            self._start(block + self.buffers.shape[0])

    def _start(self, block: Any) -> None:
        @pl.when(block < self.num_token_blocks * self.chips * self.each)
        def _() -> None:
            for copy in self._copies(block):
                copy.start()

    def _copies(self, block: Any) -> list[Any]:
        turn = lax.rem(block, self.buffers.shape[0])
        _, _, rows, columns = self.buffers.shape
        chip = lax.rem(lax.div(block, self.each), self.chips)
        row, column = self.corner(chip, lax.rem(block, self.each))
        part = pl.ds(pl.multiple_of(row, rows), rows), pl.ds(pl.multiple_of(column, LANES), columns)
        return [
            pltpu.make_async_copy(
                matrix.at[self.layer, *part], self.buffers.at[turn, n], self.arrived.at[turn]
            )
            for n, matrix in enumerate(self.matrices)
        ]
