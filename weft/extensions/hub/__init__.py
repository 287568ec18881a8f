"""Models of transformers that Weft has no family for, trained as the installed transformers computes them.

Registers the family `transformers` and the implementation of that name, which reads checkpoints of any model_type that
the installed transformers knows. Attention and layouts are Weft's: the tables of the configs say how a model is split.
"""

from importlib.util import find_spec

from weft.extensions.hub.weight_table import table_weights
from weft.job.interchange import IMPLEMENTATIONS, Implementation
from weft.job.model import FAMILIES, Family

REQUIRES = ("pretrained",)
"""Extensions that this one uses: files of checkpoints are read and written there."""

PACKAGE = __name__
PRETRAINED = "weft.extensions.pretrained"

if find_spec(PRETRAINED) is not None:
    FAMILIES.register(
        Family(
            "transformers", "A class of the installed transformers; model.args are the fields of its config.",
            f"{PACKAGE}.model:build_hub_model", "decoder",
            dict(causal=True, positions=None, activation="swiglu", norm="rmsnorm", bias=False, tied=False, dropout=0.0),
            weights=table_weights, fields=("args", "dim", "layers", "tied"), config=f"{PACKAGE}.config:fields_of_args",
            rule=f"{PACKAGE}.rules:hub_rule", axes=f"{PACKAGE}.rules:split_axes", in_parts=False,
        )
    )  # fmt: skip
    IMPLEMENTATIONS.register(
        Implementation(
            "transformers", "The class of the installed transformers.", f"{PACKAGE}.config:reads",
            f"{PACKAGE}.config:checkpoint_fields", f"{PRETRAINED}.config:tokenizer_path",
            f"{PACKAGE}.hub_weights:HubWeights", f"{PRETRAINED}.checkpoint_folder:end_tokens",
            f"{PRETRAINED}.checkpoint_folder:trained_positions",
            family="transformers", export=f"{PACKAGE}.hub_folder:write_hub_folder", fallback=True,
        )
    )  # fmt: skip
