"""rankdeck put into the Python of another host: its wheel, what goes with it, and what is done there."""
