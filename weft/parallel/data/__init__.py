"""Data parallelism: replicas, ZeRO shards on FSDP2, gradient compression and local SGD."""
