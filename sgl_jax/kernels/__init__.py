"""One folder per operation: interface, float64 reference, and an implementation per platform."""
