"""Models and data for recipes and benchmarks."""
