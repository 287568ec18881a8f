"""Rules that refuse unsupported combinations, and the syntax of layouts on the command line."""
