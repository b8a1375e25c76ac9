"""What a console has heard, as a file, and that file played again in the same console."""
