"""What step is this, and how long did it take? Plain PyTorch."""
