"""Where all ranks stand, grouped and told. Pure."""
