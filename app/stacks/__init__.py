"""The stacks of all ranks, grouped and as text. Pure."""
