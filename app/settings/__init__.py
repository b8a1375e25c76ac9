"""What a person may choose about the console: looks, keys and thresholds, from files, environment and command line."""
