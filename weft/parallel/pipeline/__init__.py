"""Pipeline parallelism: the executor of a schedule and the messages between stages."""
