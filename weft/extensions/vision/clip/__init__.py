"""CLIP: an image and a text encoder with a contrastive loss, their data, and the layouts of its towers."""
