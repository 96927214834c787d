"""The mathematics of the family as pure functions and small state objects on flat tensors.

Knows torch and numpy; does not know Ray, DeepSpeed, files or clocks.
"""
