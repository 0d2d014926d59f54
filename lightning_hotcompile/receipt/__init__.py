"""Tell people what happened."""
