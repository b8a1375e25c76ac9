"""Ranks' log files: followed, split into lines, read by offset; and what they say of a failure."""
