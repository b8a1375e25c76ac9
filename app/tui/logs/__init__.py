"""Log lines in memory, and the search in them."""
