"""Pages and rows: allocators, page tables, locks."""
