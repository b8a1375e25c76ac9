"""What a person types to see only some ranks, log lines or events."""
