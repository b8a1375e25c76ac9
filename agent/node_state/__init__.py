"""What a node knows, pure: observations in, one NodeReport out."""
