"""Terminal output of the commands: tables, progress and summaries."""
