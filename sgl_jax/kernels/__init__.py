"""One folder per operation: an interface and an implementation per platform."""
