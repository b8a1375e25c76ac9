"""The console's screens: every module that uses Textual."""
