"""Look at a run that has ended, or that is under way, from its files."""
