"""Capture the first steps of a script that trains with Lightning, without changing it."""
