"""What is kept of an incident: what was heard before and after it, stacks, output and versions, in one file."""
