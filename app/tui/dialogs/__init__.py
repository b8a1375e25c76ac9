"""Screens over the console: help, questions, the start form, the doctor, stacks."""
