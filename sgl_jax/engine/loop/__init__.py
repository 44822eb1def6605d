"""The engine process: the loop that runs steps, and its work between them."""
