"""The command line: one module a command group, and every terminal view. Commands import what they use when they run."""
