"""File formats other than plain text: tables, compressed lines, and the token files of other libraries."""
