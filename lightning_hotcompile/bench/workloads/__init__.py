"""What the suites measure: seeded modules with persistent parameters, and the ways to compile each."""
