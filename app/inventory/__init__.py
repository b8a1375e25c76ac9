"""The hosts of a cluster: read from `rankdeck.toml`, a hostfile or a Slurm allocation."""
