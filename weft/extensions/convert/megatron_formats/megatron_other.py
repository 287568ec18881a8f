"""Megatron-LM's arguments beyond the training of decoders: inference, other tasks, its services and its kernels."""

from __future__ import annotations

from weft.extensions.convert.megatron_formats.megatron_model import KERNELS, OVERLAP
from weft.extensions.convert.settings import Rule, absent, as_number, choice, switch, to, unneeded

INFERENCE = absent("serving is not in Weft; weft export RUN --to hf opens in vLLM")
REINFORCEMENT = absent("reinforcement learning is not in Weft")
RETRIEVAL = absent("retrieval models are not in Weft; model.family=bert has encoders of texts")
VISION = absent("see model.family=vit, resnet and clip for pictures")
RECOVERY = unneeded("runs recover from lost and hung ranks by themselves")
TELEMETRY = unneeded("metrics of all ranks are in RUN/metrics.jsonl; watch.trackers sends them on")
HYBRID = absent("state-space and linear-attention layers are not in Weft")
FILL = absent("fill-in-the-middle is not in Weft")
LOGITS = absent("distillation is not in Weft")
PRECISION = absent("see the sections precision and fp8 of a job")
SHARDS = unneeded("FSDP2 holds the shards (parallel.dp_shard, parallel.zero)")
STORES = unneeded("checkpoints and data are opened by their paths, s3:// and gs:// too")


def _yarn(job_field: str) -> Rule:
    return lambda value, settings: to(job_field)(as_number(value), settings)


def _all(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


OTHER_RULES: dict[str, Rule] = {
    # of training
    "encoder-num-layers": to("model.layers"),
    "encoder-seq-length": to("data.seq_len"),
    "batch-size": to("train.microbatch"),
    "model-parallel-size": to("parallel.tp"),
    "yarn-beta-fast": _yarn("model.rope_scaling.beta_fast"),
    "yarn-beta-slow": _yarn("model.rope_scaling.beta_slow"),
    "yarn-original-max-position-embeddings": _yarn("model.rope_scaling.original_len"),
    "yarn-correction-range-round-to-int": switch({"model.rope_scaling.truncate": True}),
    "no-yarn-correction-range-round-to-int": switch({"model.rope_scaling.truncate": False}),
    "rope-type": choice({"rope": {"model.positions": "rope"}, "yarn": {"model.rope_scaling.kind": "yarn"}}),
    "torch-fsdp2-no-reshard-after-forward": switch({"parallel.zero": 2}),
    "dataloader-inter-document-masking": switch({"data.mask_documents": True}),
    "params-dtype": unneeded("master weights are fp32; precision says what is computed in"),
    "sft": switch({"data.format": "chat"}),
    "sft-tokenizer-prompt-format": unneeded("the tokenizer's own chat template is used; data.template names another"),
    "use-same-sampling-seed-across-dp-ranks": unneeded("the samples of a run depend on train.seed alone"),
    "skip-train": absent("weft train trains; val_loss is measured every train.eval_every steps"),
    "distributed-timeout-seconds-after-init": to("comm.timeout_s"),
    "check-for-large-grads": unneeded("guards roll a run back at spikes and end it when it diverges"),
    "check-for-spiky-loss": unneeded("guards roll a run back at spikes and end it when it diverges"),
    "check-weight-hash-across-dp-replicas-interval": to("resilience.check_every"),
    "optimizer-cuda-graph": KERNELS,
    "fp16-lm-cross-entropy": absent("the loss is computed in fp32"),
    "init-method-xavier-uniform": absent("weights are initialised by the model family"),
    "full-validation": switch({"train.eval_batches": 10**9}),
    **_all("decoder-num-layers decoder-seq-length", absent("decoders behind an encoder: model.family=t5")),
    **_all("eval-micro-batch-size eval-global-batch-size", unneeded("evaluation uses train.microbatch")),
    **_all("decoupled-lr decoupled-min-lr head-lr-mult", absent("every weight has one learning rate")),
    **_all("lion-* soap-* adaptive-muon-*", absent("optimizers are adamw, sgd, adafactor, muon, lars and lamb")),
    **_all("no-weight-decay-cond-type apply-wd-to-qk-layernorm", unneeded("norms and biases have no weight decay")),
    **_all("quick-geglu activation-func-clamp-value glu-linear-offset", absent("Weft has gelu, swiglu and geglu")),
    **_all("no-rope-freq window-attn-skip-freq", absent("set model.window")),
    **_all("relative-attention-*", absent("model.family=t5 has relative positions")),
    **_all("heterogeneous-layers-*", absent("blocks are alike")),
    **_all("sample-rate step-batch-size-schedule phase-transition-iterations", absent("see train.batch_ramp")),
    "no-data-sharding": unneeded("samples are shuffled; their order depends on train.seed"),
    **_all("iterations-to-skip start-eval-at-iter override-ckpt-iteration", absent("the run's own steps are counted")),
    **_all("warmup", absent("deprecated in Megatron; set optim.warmup")),
    **_all("qk-clip* qk-l2-norm attention-output-gate fp32-residual-connection mup-* use-mup mhc-* enable-mhc-*",
           absent("no such setting of a block in Weft")),
    **_all("dsa-* experimental-attention-variant*", absent("sparse attention is not in Weft")),
    **_all("optimizer-cpu-* no-pin-cpu-* pin-cpu-* use-torch-optimizer-for-cpu-offload fine-grained-* offload-modules "
           "activation-offload-* delta-offload-* delay-offload-* min-offloaded-*",
           unneeded("memory.offload moves states and activations")),
    **_all("per-dataset-sequences-path object-storage-cache-path dataloader-* mid-level-dataset-surplus "
           "vocab-extra-ids "
           "multiple-validation-sets validation-set-names", absent("build a token store by weft data build")),
    **_all("tiktoken-* tokenizer-* null-tokenizer-* special-tokens chat-template trust-remote-code metadata-path "
           "allow-ambiguous-pad-tokens pad-vocab-size use-gigatoken",
           absent("set data.tokenizer to a tokenizer.json; a token store has its own tokenizer")),
    "yaml-cfg": absent("convert the command line"),
    # services and files
    **_all("inprocess-* ft-* calc-ft-timeouts enable-ft-package adlr-autoresume* straggler-* disable-straggler-* "
           "error-injection-* gpu-sniff-test-interval result-rejected-tracker-filename", RECOVERY),
    **_all("otel-* one-logger-* app-tag-* run-workload-inspector-server filter-warnings set-level-for-* "
           "modules-to-filter runtime-time-unit throughput-window-size memory-* record-* nvtx-ranges "
           "pytorch-profiler-* "
           "flight-recorder-* use-nsys-profiler sharp-enabled-group use-sharp dump-param-to-param-group-map "
           "save-config-filepath", TELEMETRY),
    **_all("non-persistent-* replication* save-optim save-rng load-optim load-rng load-main-params-* async-* "
           "fully-parallel-* distrib-optim-* verify-integrity strict-fsdp-* "
           "use-persistent-ckpt-worker save-tokenizer-assets use-mp-args-* use-tokenizer-model-* hetereogenous-*",
           unneeded("a checkpoint holds everything and opens in every layout")),
    **_all("save-*-interval", absent("weft trace and weft diagnose show single steps")),
    **_all("enable-msc disable-msc", STORES),
    # kernels, precision and communication
    **_all("fsdp-* megatron-fsdp-* outer-dp-* enable-full-sharding-in-hsdp", SHARDS),
    **_all("gtp-* ddp-* use-nccl-ub no-overlap-* no-align-* align-* suggested-communication-unit-size "
           "disable-symmetric-registration create-all-gather-group high-priority-* use-gloo-process-groups "
           "no-use-layer-wise-* batch-p2p-* use-ring-exchange-p2p fake-process-group "
           "hierarchical-context-parallel-sizes max-seqlen-per-dp-cp-rank "
           "pipeline-model-parallel-comm-backend", OVERLAP),
    **_all("fp4-* keep-fp8-transpose-cache reuse-grad-buf-* te-precision-config-file kitchen-* use-kitchen* "
           "first-last-layers-bf16 num-layers-at-*-in-bf16", PRECISION),
    **_all("mla-down-proj-fusion disable-jit-fuser use-fused-* fused-* use-te-* use-transformer-engine-* "
           "enable-experimental onnx-safe test-mode train-sync-interval batch-invariant-* "
           "flash-attention-version", KERNELS),
    # other kinds of models and tasks
    **_all("inference-* inference decode-only-cuda-graphs enable-chunked-prefill max-tokens-to-oom "
           "num-speculative-tokens "
           "use-legacy-static-engine cache-mla-latents output-bert-embeddings flash-decode nccl-all-reduce-for-prefill "
           "mlp-chunks-for-*", INFERENCE),
    **_all("rl-* grpo-* langrl-* perform-rl-step refit-method", REINFORCEMENT),
    **_all("bert-* biencoder-* ict-* block-data-path embedding-path evidence-data-path titles-data-path indexer-* "
           "query-in-block-prob retriever-* retro-* use-one-sent-docs short-seq-prob mask-prob", RETRIEVAL),
    **_all("dino-* vision-* swin-* img-* num-classes num-channels patch-dim classes-fraction data-per-class-fraction "
           "iter-per-epoch mask-type mask-factor", VISION),
    **_all("hybrid-* mamba-* linear-* is-hybrid-model gdp-*", HYBRID),
    **_all("fim-*", FILL),
    **_all("logits-* output-logit-dtype", LOGITS),
}  # fmt: skip
