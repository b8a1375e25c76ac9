"""What the views are drawn with: lines, columns, charts, header and footer."""
