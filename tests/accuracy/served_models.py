"""The models that the tests of accuracy serve, and how well they do what they were trained for."""

from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).parents[2] / "models"


class ServedModel(NamedTuple):
    """A model of this repository."""

    name: str  # its folder
    min_accuracy: float  # a share of the questions; less would be the server's doing
    draft_layer: str  # the algorithm of the layer that was trained to draft for it

    @property
    def path(self) -> Path:
        """Its folder, whole."""
        return MODELS / self.name


DENSE = ServedModel("demo", 0.95, "EAGLE3")
# Attention and gated delta nets in turn: its states are in the prefix cache as well.
HYBRID = ServedModel("demo_hybrid", 0.8, "MTP")
