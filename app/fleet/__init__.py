"""Connections to agents: reports come up, commands go down."""
