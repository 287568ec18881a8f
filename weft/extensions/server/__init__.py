"""Parameter server and federated averaging: the first server (chief) assigns work, workers compute.

Registers the modes `server` and `federated` of `train.sync`.

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

from weft.job.sync import SYNC_MODES, SyncMode

PACKAGE = __name__

SYNC_MODES.register(
    SyncMode(
        "server", ("order", "servers", "staleness", "gather", "snapshot_every", "host"),
        short_forms={"async": {"order": "async"}, "sync": {"order": "sync"}},
        start=f"{PACKAGE}.launcher:train_with_servers", exchange_bytes=f"{PACKAGE}.plan_rules:server_bytes",
        rule=f"{PACKAGE}.plan_rules:server_rule",
    )
)  # fmt: skip
SYNC_MODES.register(
    SyncMode(
        "federated",
        (
            "every", "outer_lr", "outer_momentum", "clients", "sampled", "skew", "clip", "noise", "delta", "secure",
            "min_clients", "tolerance", "host",
        ),
        start=f"{PACKAGE}.launcher:train_with_servers", exchange_bytes=f"{PACKAGE}.plan_rules:federated_bytes",
        rule=f"{PACKAGE}.plan_rules:federated_rule",
    )
)  # fmt: skip
