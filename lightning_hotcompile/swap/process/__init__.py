"""What this process and its threads have: cores, memory, modes and hooks of torch, and time limits."""
