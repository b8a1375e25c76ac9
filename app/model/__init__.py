"""What the nodes have said, folded into nodes, jobs and ranks. Pure."""
