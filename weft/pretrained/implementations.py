"""The implementation of the core: families of Weft's own. A new one is an entry in an extension."""

from __future__ import annotations

from weft.job.model import IMPLEMENTATIONS, Implementation
from weft.pretrained.checkpoint_folder import CONFIG, find_folder, read_json
from weft.pretrained.family_entry import families_of


def reads(name: str) -> bool:
    """Whether Weft has a family for the model_type of a checkpoint."""
    return bool(families_of(read_json(find_folder(name) / CONFIG).get("model_type")))


IMPLEMENTATIONS.register(
    Implementation(
        "weft",
        "A family of Weft's own.",
        "weft.pretrained.implementations:reads",
        "weft.pretrained.config:model_fields",
    )
)
