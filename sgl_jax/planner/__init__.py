"""Plan a deployment on TPUs without one: memory, speed, and advice."""
