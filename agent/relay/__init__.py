"""More than one hop: agents dial a relay, which merges the latest report of every node for the consoles that ask it."""
