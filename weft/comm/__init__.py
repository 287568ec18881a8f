"""Collectives along one axis of the mesh, with counters, algorithms, compression and backends."""
