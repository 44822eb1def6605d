"""Lines of a mixture of experts, from tokens and back: layers call `interface`."""
