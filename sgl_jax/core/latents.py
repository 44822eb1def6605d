"""Shapes of latent attention, which caches one row per token for all heads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of an attention layer with keys and values computed from a compressed latent
    (multi-head latent attention, arXiv 2405.04434); see `layers.latent_attention`."""

    rank: int  # size of a token's latent
    nope_dim: int  # part of a head's query and key without a position, derived from the latent
    rope_dim: int  # rotated part of a head's query and key; all heads share one rotated key
    value_dim: int  # size of a head's value
    query_rank: int | None  # size of the queries' latent; None: queries from hidden states

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Return the number of cached values per token."""
        return self.rank + self.rope_dim
