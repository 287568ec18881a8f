"""Search over layouts: the space of candidates, the search itself, and the survey that `weft plan` prints."""
