"""LLaMA-Factory's YAML: Hugging Face's TrainingArguments, and fields of its own for model, data and method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.extensions.convert import fine_tuning_data, training_arguments
from weft.extensions.convert.accelerate import has_keys, read
from weft.extensions.convert.conversion import SourceFormat
from weft.extensions.convert.settings import (
    Result,
    Rule,
    Settings,
    absent,
    choice,
    is_off,
    partly,
    switch,
    to,
    unneeded,
)

DATA = absent("set data.source to the dataset's file, and data.format to instruction (alpaca) or chat (sharegpt)")
LORA = absent("adapters have rank, alpha, dropout and targets (model.lora)")
VISION = absent("pictures and texts together are model.family=clip only")
PREFERENCES = absent("preference training is not in Weft")


def _precision(value: Any, settings: Settings) -> Result:
    return switch({"precision": "bf16"})(value, settings)


TABLE: dict[str, Rule] = {
    **training_arguments.TABLE,
    "model_name_or_path": to("model.pretrained", str),
    "adapter_name_or_path": LORA,
    "cache_dir": unneeded("the hub cache of the environment (HF_HOME)"),
    "trust_remote_code": absent("Weft never runs code of a checkpoint"),
    "use_fast_tokenizer": unneeded("tokenizer.json is used"),
    "resize_vocab": absent("the vocabulary is that of the checkpoint"),
    "flash_attn": unneeded("the fastest attention of torch is chosen"),
    "enable_liger_kernel": unneeded("Weft has fused kernels of its own"),
    "use_unsloth*": unneeded("Weft has fused kernels of its own"),
    "shift_attn": absent("S²-attention is not in Weft"),
    "rope_scaling": partly(
        choice(
            {
                "linear": {"model.rope_scaling.kind": "linear"},
                "dynamic": {"model.rope_scaling.kind": "dynamic"},
                "yarn": {"model.rope_scaling.kind": "yarn"},
                "llama3": {"model.rope_scaling.kind": "llama3"},
            }
        ),
        "set model.rope_scaling.factor",
    ),
    "quantization_*": absent("weights are not quantized in training"),
    "double_quantization": absent("weights are not quantized in training"),
    "upcast_*": unneeded("norms and losses are computed in fp32"),
    "disable_gradient_checkpointing": switch({"memory.recompute": "none"}, {"memory.recompute": "full"}),
    "stage": choice(
        {
            "pt": {},
            "sft": {"data.answers_only": True},
            "rm": "reward models are not in Weft",
            "ppo": "reinforcement learning is not in Weft",
            "dpo": "preference training is not in Weft",
            "kto": "preference training is not in Weft",
        }
    ),
    "finetuning_type": training_arguments.adapters("lora_rank"),
    **training_arguments.lora_table("lora_rank", "lora_target", "finetuning_type", "lora"),
    "lora_*": LORA,
    "additional_target": LORA,
    "loraplus_*": LORA,
    "use_dora": LORA,
    "use_rslora": LORA,
    "pissa_*": LORA,
    "freeze_*": absent("model.frozen is for modules of your own"),
    "pref_*": PREFERENCES,
    "dpo_*": PREFERENCES,
    "kto_*": PREFERENCES,
    "ppo_*": PREFERENCES,
    "ref_model*": PREFERENCES,
    "reward_model*": PREFERENCES,
    "simpo_gamma": PREFERENCES,
    "use_galore": absent("GaLore is not in Weft"),
    "galore_*": absent("GaLore is not in Weft"),
    "use_badam": absent("BAdam is not in Weft"),
    "badam_*": absent("BAdam is not in Weft"),
    "use_muon": switch({"optim.name": "muon"}),
    "pure_bf16": partly(switch({"precision": "bf16"}), "master weights and states stay fp32"),
    "plot_loss": unneeded("RUN/report.html has the curves"),
    "dataset": DATA,
    "dataset_dir": DATA,
    "eval_dataset": DATA,
    "media_dir": DATA,
    "tokenized_path": DATA,
    "template": unneeded(fine_tuning_data.OWN_TEMPLATE),
    "cutoff_len": to("data.seq_len"),
    "max_samples": absent("train.steps × train.global_batch samples are read"),
    "val_size": to("data.val_fraction"),
    "packing": fine_tuning_data.PACKING,
    "neat_packing": partly(
        switch({"data.packing": True}), "no attention between packed conversations; of text, data.mask_documents"
    ),
    "train_on_prompt": fine_tuning_data.ANSWERS_ONLY,
    "mask_history": absent("every answer of a conversation is trained on"),
    "streaming": switch({"data.streaming": True}),
    "buffer_size": unneeded("data.streaming shuffles the samples of 8 parts together"),
    "mix_strategy": absent("data.mixture has sources with weights"),
    "interleave_probs": absent("data.mixture has sources with weights"),
    "preprocessing_*": unneeded("weft data build uses all cores"),
    "overwrite_cache": unneeded("weft data build writes a new store"),
    "ignore_pad_token_for_loss": unneeded("padding has no loss"),
    "dataloader_num_workers": training_arguments.DATA_LOADER,
    "compute_accuracy": switch({"train.metrics": ["accuracy"]}),
    "predict_with_generate": absent("weft generate RUN writes texts"),
    "use_swanlab": absent("trackers are tensorboard, wandb, mlflow and trackio"),
    "swanlab_*": absent("trackers are tensorboard, wandb, mlflow and trackio"),
    "ray_*": unneeded("weft launch"),
    "include_effective_tokens_per_second": unneeded("metrics have tokens_per_s"),
    "create_new_adapter": LORA,
    "image_*": VISION,
    "video_*": VISION,
    "audio_*": VISION,
    "use_apollo": absent("APOLLO is not in Weft"),
    "apollo_*": absent("APOLLO is not in Weft"),
    "use_adam_mini": absent("Adam-mini is not in Weft; memory.states=8bit makes states smaller"),
    "mixture_of_depths": absent("mixture of depths is not in Weft"),
    "use_llama_pro": absent("blocks are not added to a checkpoint"),
    "moe_aux_loss_coef": lambda value, settings: (
        Result(note="off", status="not needed")
        if is_off(value)
        else Result({"model.experts.balance": "aux", "model.experts.aux_weight": value})
    ),
    "fsdp_config": absent("set parallel.dp_shard, parallel.zero and parallel.dp_replicate"),
    "disable_shuffling": switch({"data.shuffle": "none"}),
    "early_stopping_steps": absent("a run takes train.steps steps"),
    "enable_thinking": unneeded(fine_tuning_data.OWN_TEMPLATE),
    "tool_format": unneeded(fine_tuning_data.OWN_TEMPLATE),
    "default_system": absent("put a system message into the conversations"),
    "placement_strategy": unneeded("weft launch"),
    "fp8": switch({"precision": "fp8"}),
    "fp8_*": unneeded("Weft's own fp8 layers are used"),
    "use_kt": absent("KTransformers is not in Weft; see memory.offload"),
    "kt_*": absent("KTransformers is not in Weft; see memory.offload"),
    "use_v1_kernels": unneeded("Weft has fused kernels of its own"),
    "dataset_shards": unneeded("every rank reads its own samples of the same files"),
    "sp_size": to("parallel.cp"),
    "sequence_parallel_*": to("parallel.cp"),
    "use_dft_loss": absent("the loss is the cross-entropy of answers"),
    "use_asft_loss": absent("the loss is the cross-entropy of answers"),
    "use_eaft_loss": absent("the loss is the cross-entropy of answers"),
    "asft_*": absent("the loss is the cross-entropy of answers"),
    "eaft_*": absent("the loss is the cross-entropy of answers"),
    "eval_on_each_dataset": absent("names in data.mixture give val_loss/NAME of each source"),
    "infer_*": absent("serving is not in Weft; weft export RUN --to hf opens in vLLM"),
    "vllm_*": absent("serving is not in Weft; weft export RUN --to hf opens in vLLM"),
}


def detect(text: str, path: Path) -> bool:
    return has_keys(text, "model_name_or_path", "finetuning_type")


def _defaults(settings: Settings) -> dict[str, tuple[Any, str]]:
    defaults = training_arguments.defaults(settings, "per_device_train_batch_size", 8, "num_train_epochs", 3)
    defaults["data.seq_len"] = (2048, "the default of cutoff_len")
    defaults["data.val_fraction"] = (0.0, "the default of val_size")
    defaults["memory.recompute"] = ("full", "disable_gradient_checkpointing is off")
    if "stage" not in settings:
        defaults["data.answers_only"] = (True, "the default of stage is sft")
    if settings.get("finetuning_type", "lora") == "lora":
        rank = settings.number("lora_rank", default=training_arguments.LORA_RANK)
        defaults["model.lora.rank"] = (rank, "the default of finetuning_type is lora")
        defaults["model.lora.alpha"] = (2 * rank, "the default of LLaMA-Factory: twice lora_rank")
    return defaults


LLAMAFACTORY = SourceFormat(
    "llamafactory", "a LLaMA-Factory config", read, detect, TABLE,
    defaults=_defaults,
    missing={
        "model": "no model_name_or_path; add model=hf:PATH",
        "data.source": "add data.source=PATH, a file of data.format or a token store made by weft data build",
    },
)  # fmt: skip
