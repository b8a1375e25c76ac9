"""What a console looks at and acts on: the demo, or the job of a host."""
