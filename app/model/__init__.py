"""Node reports, folded into nodes, jobs and ranks. Pure."""
