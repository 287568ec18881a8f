"""The loop, the state, checkpoints, evaluation, generation, and the proof. `weft.train(job)` trains a job."""

from weft.job.rooms import make_callable

make_callable(__name__, "weft.train.api", "train")
