"""Products of short steps that exchange hidden states over a ring: layers call `interface`."""
