"""What a plan needs to know of the data's files, without torch."""
