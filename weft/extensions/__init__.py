"""Extensions: each folder registers entries with the core's registries when it is imported, and can be deleted."""
