"""Captured graphs at work: each is witnessed, compared once, run, and answered by eager where it fails."""
