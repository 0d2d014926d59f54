"""What earlier runs have learned: profiles, compile costs and the compiler's cache."""
