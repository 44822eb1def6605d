"""Routes of operators: health, load, sessions and calls of the engine."""
