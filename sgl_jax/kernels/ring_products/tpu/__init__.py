"""The TPU's kernels of products over a ring: layers call `interface`."""
