"""What a rank reports of itself: the probe, what it reads, and how it gets into an unmodified script."""
