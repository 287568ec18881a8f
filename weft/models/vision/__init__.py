"""Models of images, and batch norm over replicas."""
