"""`python -m ddpcore.checkpoint`."""

from ddpcore.checkpoint.cli import cli

cli(prog_name="python -m ddpcore.checkpoint")
