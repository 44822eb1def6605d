"""Reading and writing of weights, directly into their shardings."""
