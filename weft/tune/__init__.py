"""`weft tune`: settings of a job found by trials, for a low loss or for speed."""
