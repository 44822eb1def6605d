"""The choice between loading a prefix and computing it: the faster one by measured rates."""

from collections.abc import Callable
from typing import NamedTuple

_OLD_SHARE = 0.75  # weight of all earlier transfers, at each new transfer
_START_TOKENS = 1024  # weight of a rate measured in advance


class PrefixElsewhere(NamedTuple):
    """The part of a prompt's prefix that CPU memory or the store has and the device lacks.

    Until it is on the device, the link moves `num_fetched` tokens, and before that the store moves
    `num_loaded`. Both include the tokens of transfers before it.
    """

    start: int  # prompt tokens before the part
    num_tokens: int
    prompt_len: int
    num_ahead: int  # prompt tokens of further requests that would be computed before it
    num_fetched: int
    num_loaded: int = 0


class TokenTime:
    """The time per token of recent transfers, in seconds."""

    def __init__(self) -> None:
        self._seconds = self._num_tokens = 0.0

    @property
    def seconds(self) -> float:
        """Return the time of one token in seconds; 0 while unmeasured."""
        return self._seconds / self._num_tokens if self._num_tokens else 0.0

    def start(self, tokens_per_s: float) -> None:
        self._seconds, self._num_tokens = _START_TOKENS / tokens_per_s, _START_TOKENS

    def add(self, seconds: float, num_tokens: float) -> None:
        """Add a transfer. A short transfer is mostly latency, so it has a low weight."""
        self._seconds = _OLD_SHARE * self._seconds + seconds
        self._num_tokens = _OLD_SHARE * self._num_tokens + num_tokens


class LoadPrices:
    """The rates of one rank.

    Attributes:
        chooses: decides whether to load a prefix: `is_sooner`, which a measurement may wrap.
        prefill_rate: prompt tokens that the rank computes per second; 0 while unmeasured.
        fetch, store: the times per token of the link to CPU memory, and of the store.
    """

    def __init__(self, *, loads_all: bool = False) -> None:
        """Create unmeasured rates. With `loads_all`, a load is always chosen."""
        self._loads_all = loads_all
        self.chooses: Callable[[PrefixElsewhere], bool] = self.is_sooner
        self.prefill_rate = 0.0
        self.fetch, self.store = TokenTime(), TokenTime()

    def is_sooner(self, prefix: PrefixElsewhere) -> bool:
        """Return whether loading is sooner than computing. Unmeasured links count as fast."""
        _, num_tokens, _, num_ahead, num_fetched, num_loaded = prefix
        seconds = load_s(num_fetched, self.fetch.seconds, num_loaded, self.store.seconds)
        is_sooner = seconds * self.prefill_rate < num_tokens + num_ahead
        return num_tokens > 0 and (self._loads_all or bool(is_sooner))

    @property
    def tokens_per_fetched(self) -> float:
        return load_s(1, self.fetch.seconds) * self.prefill_rate


def load_s(
    num_fetched: float, fetch_s: float, num_loaded: float = 0.0, store_s: float = 0.0
) -> float:
    """Return the seconds until a prefix is on the device: the store moves `num_loaded` tokens or
    bytes in `store_s` seconds each, then the link moves `num_fetched` in `fetch_s` each."""
    return num_loaded * store_s + num_fetched * fetch_s
