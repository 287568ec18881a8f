"""Context parallelism: how a sequence is split over cp ranks, and attention over the parts."""
