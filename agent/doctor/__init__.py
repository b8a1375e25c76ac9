"""A look at this node before a job comes: changes nothing, needs no agent, imports no torch."""
