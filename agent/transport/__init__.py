"""How one speaks with an agent: commands, telemetry, history, metrics, and the datagrams of its ranks."""
