"""Products of groups of lines with one matrix per group: `interface` is what layers call."""
