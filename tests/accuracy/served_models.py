"""The models that the tests of accuracy serve, and how well they do what they were trained for."""

from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).parents[2] / "models"


class ServedModel(NamedTuple):
    """A model of this repository."""

    name: str  # its folder
    min_accuracy: float  # a share of the questions; less would be the server's doing
    has_draft_layer: bool = False

    @property
    def path(self) -> Path:
        """Its folder, whole."""
        return MODELS / self.name


DENSE = ServedModel("demo", 0.95)
# Attention and gated delta nets in turn: its states are in the prefix cache as well.
HYBRID = ServedModel("demo_hybrid", 0.8, has_draft_layer=True)
