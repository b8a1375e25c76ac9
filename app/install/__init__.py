"""Installs rankdeck into the Python of another host: its wheel, its dependencies, and the steps that run there."""
