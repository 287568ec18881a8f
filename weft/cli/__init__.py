"""The command line: one module a command group, and the terminal views. Commands import what they use when they run."""
