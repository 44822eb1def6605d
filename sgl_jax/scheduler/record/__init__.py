"""Events of the scheduler, recorded and replayed."""
