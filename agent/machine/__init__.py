"""Figures of the machine itself: its GPUs, asked in a process that may hang, and its host."""
