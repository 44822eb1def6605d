"""The rule by which a router chooses and weights the experts of a token."""

from typing import NamedTuple


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
