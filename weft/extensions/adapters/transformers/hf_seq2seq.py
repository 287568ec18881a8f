"""`WeftSeq2SeqTrainer`: evaluation that generates, as transformers' Seq2SeqTrainer has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.extensions.adapters.transformers.hf_trainer import WeftTrainer


class WeftSeq2SeqTrainer(WeftTrainer):
    """A WeftTrainer whose predictions are generated tokens, with predict_with_generate. `evaluate` and `predict` take
    the arguments of generate."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._gen_kwargs: dict[str, Any] = {}

    def _generation(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of generate, by default those of the training arguments."""
        if given.get("max_length") is None and given.get("max_new_tokens") is None:
            given = given | {"max_length": self.args.generation_max_length}
        if given.get("num_beams") is None:
            given = given | {"num_beams": self.args.generation_num_beams}
        return {name: value for name, value in given.items() if value is not None}

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval", **generation: Any
    ) -> dict[str, Any]:
        self._gen_kwargs = self._generation(generation)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test", **generation: Any
    ) -> Any:
        self._gen_kwargs = self._generation(generation)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss, the generated tokens and the labels."""
        if prediction_loss_only or not self.args.predict_with_generate:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        loss = super().prediction_step(model, inputs, True)[0] if inputs.get("labels") is not None else None
        given = {k: v for k, v in inputs.items() if k not in ("labels", "decoder_input_ids", "decoder_attention_mask")}
        spread: Any = model
        tokens = spread.generate(**given, **{k: v for k, v in self._gen_kwargs.items() if v is not None})
        usual = spread.generation_config
        length = usual.max_length or (usual.max_new_tokens or 0) + 1
        return loss, self._filled(tokens, length), self._filled(inputs.get("labels"), length)

    def _filled(self, tokens: Tensor | None, length: int) -> Tensor | None:
        """Tokens filled up to a length, so that batches have one."""
        if tokens is None or tokens.shape[1] >= length:
            return tokens
        pad: Any = getattr(self.processing_class, "pad_token_id", None)
        config: Any = self.model.config
        pad = config.pad_token_id if pad is None else pad
        missing: Tensor = tokens.new_full((tokens.shape[0], length - tokens.shape[1]), pad)
        return torch.cat([tokens, missing], dim=1)
