"""Filters that the user types to see only some ranks, log lines or events."""
