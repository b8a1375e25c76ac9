"""Ranks' log files: followed, split into lines, read by offset; and what they hold of a failure."""
