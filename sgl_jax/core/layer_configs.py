"""Shapes of layers: latent attention, gated delta nets, and the choice of experts."""

from dataclasses import dataclass
from typing import NamedTuple


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


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Sizes of a gated delta net (see `layers.gated_delta_net`), over all chips of a rank."""

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads; value heads of one key head are adjacent
    key_dim: int  # per head
    value_dim: int  # per head
    conv_size: int  # width in tokens of the causal convolution of queries, keys and values

    @property
    def group(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def key_head_channels(self) -> int:
        """Return the convolved channels of a key head: query, key and all its value heads."""
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def channels(self) -> int:
        return self.num_key_heads * self.key_head_channels


# Elements in the last dimension of a TPU memory tile.
_LANES = 128


def conv_state_shape(width: int, channels: int) -> tuple[int, int]:
    """Return the shape of a convolution's state: its last `width` - 1 inputs in order.

    If `channels` is a multiple of 128, each input is split into rows of 128, so that a TPU can move
    a state without a copy. For [width - 1, channels] the compiler would choose a different layout
    and copy all states to it in each step.
    """
    rows_each = channels // _LANES if channels % _LANES == 0 else 1
    return (width - 1) * rows_each, channels // rows_each


class ExpertChoice(NamedTuple):
    """Choose the `top_k` experts with the highest scores; their weights are their scores.

    With groups (arXiv 2405.04434), adjacent experts form groups of equal size, and a token's
    experts come only from its `top_groups` best groups. The score of a group is the sum of its
    `best_of_group` highest scores.
    """

    top_k: int
    norm_topk_prob: bool  # scale the weights of the chosen experts to sum to 1
    has_sigmoid_scores: bool = False  # else scores are a softmax over all experts
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    scale: float = 1.0  # multiplies weights

    @property
    def is_plain(self) -> bool:
        """Return True for a softmax over all experts without groups or `scale`."""
        return not self.has_sigmoid_scores and self.num_groups == 1 and self.scale == 1.0
