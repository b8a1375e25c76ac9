"""One file per view of the console."""
