"""The processes of a job: the shim above them, the worker ranks, and what earlier jobs have left behind."""
