"""The choice between loading a prefix, from the host's memory or the store behind it, and computing
it: from measured rates, whichever is sooner."""

from collections.abc import Callable
from typing import NamedTuple

_OLD_SHARE = 0.75  # of earlier transfers, at each new one
_START_TOKENS = 1024  # the weight of a rate that was measured before


class PrefixElsewhere(NamedTuple):
    """The part of a prompt's prefix that the host or the store has and the device lacks.

    The link moves `num_fetched` tokens until it is there, and before that the store `num_loaded`:
    the part's own, and the ones of transfers before it.
    """

    start: int  # tokens of the prompt before it
    num_tokens: int
    prompt_len: int
    num_ahead: int  # prompt tokens of other requests that would be computed before it
    num_fetched: int
    num_loaded: int = 0


class TokenTime:
    """The seconds that a token takes in transfers of late."""

    def __init__(self) -> None:
        self._seconds = self._num_tokens = 0.0

    @property
    def seconds(self) -> float:
        """The time of one token; 0 while unmeasured."""
        return self._seconds / self._num_tokens if self._num_tokens else 0.0

    def start(self, tokens_per_s: float) -> None:
        """Begin with a measured rate."""
        self._seconds, self._num_tokens = _START_TOKENS / tokens_per_s, _START_TOKENS

    def add(self, seconds: float, num_tokens: float) -> None:
        """A transfer took so long. A short one, which is mostly delay, counts for little."""
        self._seconds = _OLD_SHARE * self._seconds + seconds
        self._num_tokens = _OLD_SHARE * self._num_tokens + num_tokens


class LoadPrices:
    """The rates of one rank.

    Attributes:
        chooses: the rule by which prefixes are loaded: `is_sooner`, which a measurement may wrap.
        prefill_rate: prompt tokens that the rank computes in a second; 0 while unmeasured.
        fetch, store: of the link to the host's memory, and of the store behind it.
    """

    def __init__(self, *, loads_all: bool = False) -> None:
        """With `loads_all`, a load is always sooner."""
        self._loads_all = loads_all
        self.chooses: Callable[[PrefixElsewhere], bool] = self.is_sooner
        self.prefill_rate = 0.0
        self.fetch, self.store = TokenTime(), TokenTime()

    def is_sooner(self, prefix: PrefixElsewhere) -> bool:
        """Return whether a prefix is loaded sooner than computed. Unmeasured rates count as fast
        links."""
        _, num_tokens, _, num_ahead, num_fetched, num_loaded = prefix
        seconds = load_s(num_fetched, self.fetch.seconds, num_loaded, self.store.seconds)
        is_sooner = seconds * self.prefill_rate < num_tokens + num_ahead
        return num_tokens > 0 and (self._loads_all or bool(is_sooner))

    @property
    def tokens_per_fetched(self) -> float:
        """The prompt tokens that are computed while one is fetched."""
        return load_s(1, self.fetch.seconds) * self.prefill_rate


def load_s(
    num_fetched: float, fetch_s: float, num_loaded: float = 0.0, store_s: float = 0.0
) -> float:
    """The seconds until a prefix is on the device: the store moves `num_loaded` tokens, or bytes,
    in `store_s` seconds each, and then the link `num_fetched` in `fetch_s`."""
    return num_loaded * store_s + num_fetched * fetch_s
