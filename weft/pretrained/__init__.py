"""Published checkpoints in the format of Hugging Face: configs, names of tensors, a reader and a writer."""
