"""What Inductor does otherwise while it compiles for us, and where its files are."""
