"""Checks whether hosts are fit for a job together, before it is started."""
