"""The optimizer's update: compiled, by torch's fused kernel, or as it was."""
