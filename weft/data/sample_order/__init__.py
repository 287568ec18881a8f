"""Which sample comes when: the order of samples, epochs, and the share of each replica in a batch."""
