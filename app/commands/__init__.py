"""The verbs of the command line, but for the demo."""
