"""The dashboard of `weft dash`: a local web server that reads run folders and changes nothing in them."""
