"""A fleet of engines behind a router, on paper: real schedulers, a clock of its own, no device."""
