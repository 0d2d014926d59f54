"""What should be compiled, and is it worth it? Pure: nothing is compiled here."""
