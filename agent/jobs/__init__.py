"""A job on this node: its lifecycle, a pure machine (`job`, `lifecycle`), and what carries it out (`all_jobs`)."""
