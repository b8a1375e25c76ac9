"""The agent as a service of its node: in the background, under systemd, and what is in its way."""
