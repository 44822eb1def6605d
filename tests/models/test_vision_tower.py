"""The vision tower against the vectors of transformers."""
