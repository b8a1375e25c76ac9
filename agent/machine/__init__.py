"""What the machine itself has to say: its GPUs, asked in a process that may hang, and its host."""
