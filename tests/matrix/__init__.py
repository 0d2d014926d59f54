"""Any Lightning run gives the same results with the callback as without: one cell per kind of run."""
