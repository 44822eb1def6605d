"""The engine process: the loop that runs steps, and what it does between them."""
