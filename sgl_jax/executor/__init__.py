"""Run step plans on a mesh of devices."""
