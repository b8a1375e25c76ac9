"""The drawing parts of the views: lines, columns, charts, header and footer."""
