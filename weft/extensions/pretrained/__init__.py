"""Published checkpoints: models and adapters of Hugging Face read and written, and weights of other libraries.

Registers the implementation of `model.pretrained`, the command `weft import`, and the formats hf, peft, dcp,
torchtitan, deepspeed and megatron of `weft export`.
"""

from weft.cli.commands import COMMANDS, RESULTS, Command
from weft.job.interchange import EXPORT_FORMATS, IMPLEMENTATIONS, ExportFormat, Implementation

PACKAGE = __name__

IMPLEMENTATIONS.register(
    Implementation(
        "weft", "A family of Weft's own.", f"{PACKAGE}.config:reads", f"{PACKAGE}.config:model_fields",
        f"{PACKAGE}.config:tokenizer_path",
        f"{PACKAGE}.reader:PretrainedWeights", f"{PACKAGE}.checkpoint_folder:end_tokens",
        f"{PACKAGE}.checkpoint_folder:trained_positions",
    )
)  # fmt: skip
COMMANDS.register(Command("import", f"{PACKAGE}.command:import_", RESULTS, trains=True))
for name in ("hf", "peft", "dcp", "torchtitan", "deepspeed", "megatron"):
    EXPORT_FORMATS.register(ExportFormat(name, name, f"{PACKAGE}.interchange.export:export_folder"))
