"""The command ``hotcompile``: one file for each group of commands."""
