"""`launch`, `queue` and the settings of the targets of `weft launch`."""
