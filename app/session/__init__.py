"""Sessions: what a console watches and acts on, the demo or a job on some hosts."""
