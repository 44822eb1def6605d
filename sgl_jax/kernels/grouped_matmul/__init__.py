"""Products of groups of lines with one matrix per group: layers call `interface`."""
