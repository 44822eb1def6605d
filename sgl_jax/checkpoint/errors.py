"""What can be wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A model folder whose weights are missing, unreadable, or not those of its config."""
