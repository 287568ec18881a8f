"""Weights in the formats of other training libraries: torch DCP, torchtitan, DeepSpeed and Megatron."""
