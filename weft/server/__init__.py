"""Runs through a server: the first server (chief) deals out work and keeps the run's files, workers compute.

chief.py      the first server's process: the run's files, evaluations, checkpoints
hub.py        who is connected, what each works on, what is asked and answered
updates.py    a parameter server: which gradients make an update
rounds.py     federated averaging: which clients train, whose update is taken
shard.py      some of the weights and their optimizer; the other servers' process
worker.py     the process that computes gradients
client.py     what it does where it plays a federated client
"""
