"""The operator's side: the command `rankdeck`, the console, and the reasoning that names a culprit."""
