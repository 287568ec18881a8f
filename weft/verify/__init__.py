"""Checks of a layout: `weft prove` and `weft dryrun`."""
