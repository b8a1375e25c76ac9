"""Which hosts there are: read from `rankdeck.toml`, and gathered from what a machine knows of its neighbours."""
