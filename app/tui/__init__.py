"""The console's face: everything that knows Textual."""
