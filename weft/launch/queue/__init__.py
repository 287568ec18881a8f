"""`weft queue`: runs of several users claim GPUs, cores and memory of one machine, through files in a shared folder."""
