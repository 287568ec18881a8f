"""Images: files of several formats, augmentation, and the dataset made of both."""
