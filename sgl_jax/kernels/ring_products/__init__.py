"""Products that exchange hidden states over a ring: layers call `interface`."""
