"""The console in a browser."""
