"""Settings of the console: looks, keys and thresholds, from files, environment and command line."""
