"""Start runs: local ranks, nodes, and the rank pool of `weft prove` and the tests."""
