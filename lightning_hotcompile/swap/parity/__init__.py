"""Is compiled code right: one graph, eager and compiled, on the same inputs."""
