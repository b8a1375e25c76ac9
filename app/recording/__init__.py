"""What a console has received, as a file, and that file replayed in the same console."""
