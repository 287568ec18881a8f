"""Single-device models, each with a table of which module plays which part."""
