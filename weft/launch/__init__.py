"""Starting ranks: a pool of them for proofs and tests, and whole runs on this machine."""
