"""Hosts reached by SSH: as OpenSSH would reach them, with verified keys, and their sockets brought here."""
