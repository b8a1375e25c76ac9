"""Facts and verdicts as rows and sentences for people. Pure."""
