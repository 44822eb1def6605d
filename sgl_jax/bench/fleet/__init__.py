"""A simulated fleet of engines and its router: real schedulers, a logical clock, no device."""
