"""What this process has: cores, memory, its heap, and a limit on the time of a call."""
