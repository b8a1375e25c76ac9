"""Log lines in memory, and those of them that are wanted."""
