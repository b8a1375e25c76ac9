"""What a program logs: means over ranks, lines of them, where these go, and values that all ranks agree on."""
