"""Slurm: what its commands know of a job, and a job that runs in one of its steps."""
