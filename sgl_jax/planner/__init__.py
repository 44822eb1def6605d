"""Planning a deployment on TPUs without one: what fits, how fast it may be, and what would help."""
