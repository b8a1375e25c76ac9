"""The commands of `rankdeck`."""
