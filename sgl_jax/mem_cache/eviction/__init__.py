"""The order in which cached pages are evicted."""
