"""The serving memory stack of one rank: pages, rows, leases, prefix caches, ledger."""
