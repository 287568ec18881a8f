"""The runs below a folder: found by their files, with their summaries and curves."""
