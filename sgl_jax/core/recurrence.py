"""Shapes of a recurrent layer, which replaces an attention layer."""

from dataclasses import dataclass


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
