"""Expert dispatch in a mixture of experts, from tokens and back: layers call `interface`."""
