"""Plans a deployment on TPUs without one: whether it fits, its speed, and advice."""
