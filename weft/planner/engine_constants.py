"""Sizes and limits of the training engine that the planner's predictions also use. Both import them from here."""

from __future__ import annotations

GRADIENT_ALIGNMENT = 64
"""Elements to which each gradient in a replicas' bucket is aligned, so that it begins on a cache line."""
PREFETCHED_MESSAGES = 2
"""Receives that a pipeline rank posts for each peer before it needs the messages."""
MIN_COMPRESSED_ELEMENTS = 256
"""Weights with fewer elements are sent uncompressed."""
QUANTIZATION_BLOCK = 256
"""Elements that share one scale in quantized sums."""
QUANTIZATION_SCALE_BYTES = 4
FP8_ALIGNMENT = 16
"""Both sizes of a weight matrix must be a multiple of this to be multiplied in fp8; others stay in bf16."""
LOGITS_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Bytes of logits that the chunked loss holds at once, by device. A GPU needs large products to be fully used."""
ALIGNED_BYTES = 16
"""Rows of logits on a GPU are a multiple of this, which fast kernels need: other vocabularies are padded."""
PADDED_VOCAB = 64
"""Logits to a multiple of which a vocabulary is padded there."""
FP8_LOGITS_CHUNKS = 2
"""An fp8 head holds one-byte gradients of up to this many chunks of logits."""
LONG_SEQUENCE_CHUNK = 16_384
"""Tokens of a long sequence that pass through a block's linear layers at once."""
STREAMED_PIECE_ELEMENTS = 32 << 20
"""Weights whose states are copied to the device together, unless one that cannot be cut is larger."""
STREAM_SLOTS = 3
"""Pieces on the device at once, at least: one that arrives, one that is updated, one that leaves."""
WEIGHT_UNITS = 2
"""Units on the device at once whose weights live in host memory: one that computes, and one that arrives."""
STATE_SCALE_BLOCK = 128
"""Elements of a row that share a scale in 8-bit states."""
MIN_CODED_COLUMNS = 16
"""States of weights with shorter rows stay exact: scales would take the space that codes save."""
CODED_ELEMENTS = 4 << 20
"""Elements of a state that are encoded at once, which bounds the temporary tensors."""
ACTIVATION_SCALE_BLOCK = 128
"""Elements that share a scale in fp8 activations."""
SMALL_ACTIVATIONS = 8
"""Saved tensors of less than the size of a block's input divided by this stay exact: statistics of rows."""
MUON_ITERATIONS = 5
"""Newton–Schulz iterations of one Muon update."""
UPDATED_ELEMENTS = 16 << 20
"""Elements of weights that adafactor, muon, lars and lamb update together, unless one weight is larger."""
NOISE_VALUES = 2**17
"""Different values of the noise of stochastic rounding; also the numbers that a CPU encodes at a time, which fit its
cache."""

RANK_PROCESS_BYTES = 64 * 2**20
"""Memory of a CPU rank's process that it shares with no other, before it holds a model."""
