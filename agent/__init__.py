"""The node's side: a headless daemon that launches worker ranks, watches them, and publishes what they are doing."""
