"""Programs to run, to read and to test with: what a user of DDP would write."""
