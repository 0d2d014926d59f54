"""Compile ahead, in a child process, while training goes on."""
