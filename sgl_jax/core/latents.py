"""Shapes of latent attention, whose cache holds one row a token for all heads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of an attention layer whose keys and values are products of a compressed latent
    (multi-head latent attention, arXiv 2405.04434); see `layers.latent_attention`."""

    rank: int  # numbers of the latent of a token
    nope_dim: int  # of a head's query and key: the part without a position, made from the latent
    rope_dim: int  # the rotated part; all heads share one key of it
    value_dim: int  # of a head
    query_rank: int | None  # numbers of the queries' own latent; None: made from hidden states

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.rope_dim
