"""How others speak with an agent: commands, reports, history, metrics, and the datagrams of its ranks."""
