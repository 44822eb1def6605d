"""Gives the memory of long requests back to the system.

What a request leaves behind may hang together in circles, of exceptions and the frames they went
through, which Python frees at some later time; and the C library keeps what it once had.
"""

import asyncio
import ctypes
import gc

_LONG_BYTES = 2**20
_DELAY_S = 1.0  # once for all requests that end within it


class MemoryReturn:
    """One per server."""

    def __init__(self) -> None:
        self._is_due = False

    def after(self, num_bytes: int) -> None:
        """A request with a body of so many bytes has ended."""
        if num_bytes >= _LONG_BYTES and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_DELAY_S, self._start)

    def _start(self) -> None:
        self._is_due = False
        # Milliseconds: what the server is made of was frozen when it started.
        gc.collect()
        asyncio.get_running_loop().run_in_executor(None, _trim)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
