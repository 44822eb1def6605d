"""Products with quantized matrices: layers call `interface`."""
