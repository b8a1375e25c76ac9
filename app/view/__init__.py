"""Facts and verdicts as rows and sentences for users. Pure."""
