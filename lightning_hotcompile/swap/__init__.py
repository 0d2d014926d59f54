"""Change the running model, and change it back."""
