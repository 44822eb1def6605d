"""How files hold quantized matrices: a reader for each packing, chosen by `readers`."""
