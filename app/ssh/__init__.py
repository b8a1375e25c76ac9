"""Hosts reached by SSH as OpenSSH would reach them, with verified keys; their sockets appear on this machine."""
