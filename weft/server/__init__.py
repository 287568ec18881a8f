"""Parameter server and federated averaging: the first server (chief) assigns work, workers compute.

launcher.py             starts and restarts the processes of a run
main.py                 entry point of each process
chief.py                process of the first server: run files, evaluation, checkpoints
connections.py          sockets of the chief and the servers, one thread a peer
parameter_server.py     which gradients make an update
server_group.py         all parameter servers as one: update, snapshot, restore
server_shard.py         weights and optimizer state of one server
federated_averaging.py  rounds of federated averaging: which clients train, how updates are averaged
federated_client.py     what a client computes in a round
federated_update.py     the averaged update of a round, and the outer step
secure_averaging.py     rounds with secure aggregation: the server sees only sums
secure_round.py         the phases of such a round on the server
secure_aggregation.py   keys, shares and masks
privacy.py              epsilon and delta of clipping and noise
client_samples.py       which training samples belong to which client
update_checks.py        which client updates are rejected
worker.py               process that computes gradients
run_records.py          metrics, events and progress that the chief writes
rendezvous.py           where the processes find the chief's address
"""
