"""Several nodes in one run: discovery, membership, consensus on attempts, and the supervisor of one node."""
