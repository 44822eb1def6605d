"""The rule by which a router chooses experts for a token and weighs them."""

from typing import NamedTuple


class ExpertChoice(NamedTuple):
    """The `top_k` experts of the greatest scores are chosen; their weights are their scores.

    With groups (arXiv 2405.04434), neighbouring experts form groups of equal size, and a token's
    experts are of its `top_groups` best groups alone. A group's score is the sum of its
    `best_of_group` greatest.
    """

    top_k: int
    norm_topk_prob: bool  # the chosen experts' weights are scaled to sum to 1
    has_sigmoid_scores: bool = False  # else scores are a softmax over all experts
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    scale: float = 1.0  # multiplies weights

    @property
    def is_plain(self) -> bool:
        """True for a softmax over all experts without groups, whose weights are left as they are
        or normalised."""
        return not self.has_sigmoid_scores and self.num_groups == 1 and self.scale == 1.0
