"""What other programs, people and older versions call the fields and values of a recipe. Imports no torch."""

from collections.abc import Sequence
from typing import Any

GONE = {
    "compile.cache": "torch keeps compiled code in TORCHINDUCTOR_CACHE_DIR (docs/running.md); remove it",
    "float8.sample_every": "scales come from the values themselves, so that only infinities overflow; remove it",
}
"""Fields of older versions -> what to do instead. The recipe.toml of a run may still have them; nothing reads them."""
KEYS = {
    "run.steps": "max_steps num_steps total_steps train_steps training_steps max_iters train_iters num_train_epochs",
    "run.output": "output_dir out_dir save_dir dump_folder",
    "model.weights": "model_name_or_path pretrained init_from load_from checkpoint_path",
    "model.name": "model_name flavor architecture",
    "model.width": "hidden_size d_model n_embd dim hidden_dim embed_dim",
    "model.layers": "num_layers n_layers n_layer num_hidden_layers depth",
    "model.heads": "num_heads n_heads n_head num_attention_heads",
    "model.key_value_heads": "num_key_value_heads n_kv_heads num_kv_heads num_query_groups",
    "model.feed_forward_width": "intermediate_size ffn_hidden_size ffn_dim mlp_dim",
    "model.vocabulary": "vocab_size padded_vocab_size",
    "data.source": "dataset dataset_name dataset_path data_path train_data train_file data_dir",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path",
    "batch.sequence_length": "seq_len seq_length max_seq_len max_seq_length max_length block_size context_length n_ctx",
    "batch.global_batch_size": "gradient_accumulation_steps grad_accum_steps accumulation_steps train_batch_size gbs",
    "batch.micro_batch_size": "per_device_train_batch_size local_batch_size device_batch_size mbs",
    "mesh.tensor": "tp tensor_parallel tensor_model_parallel",
    "mesh.context": "cp context_parallel",
    "mesh.pipeline": "pp pipeline_parallel pipeline_model_parallel",
    "mesh.tensor, which includes it, or mesh.context": "sequence_parallel sp",
    "mesh.shard": "dp data_parallel dp_shard data_parallel_shard fsdp zero zero_stage",
    "mesh.replicate": "ddp hsdp dp_replicate data_parallel_replicate",
    "attention.backend": "attn_implementation attention_implementation flash_attention use_flash_attn",
    "float8.recipe": "fp8 enable_fp8 use_fp8 fp8_recipe",
    "activation_checkpointing.mode": "gradient_checkpointing grad_checkpointing activation_recomputation recompute",
    "compile.enabled": "torch_compile use_compile",
    "fsdp.param_dtype": "dtype torch_dtype precision mixed_precision bf16 fp16",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr",
    "optimizer.grad_clip": "max_grad_norm max_norm clip_grad gradient_clipping gradient_clip_val clip_grad_norm",
    "schedule.kind": "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps warmup_ratio",
    "schedule.min_lr_ratio": "min_lr lr_min final_lr",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_interval ckpt_interval",
    "checkpoint.keep": "save_total_limit keep_last keep_latest_k",
    "metrics.every": "logging_steps log_every log_interval log_freq",
    "metrics.wandb": "use_wandb enable_wandb report_to",
    "validation.every": "eval_steps eval_every eval_interval val_interval",
    "the environment variable NPROC (of scripts/run.sh)": "gpus num_gpus devices nproc nproc_per_node",
}
"""The field, or other words -> what it is called elsewhere, in lower case."""
FIELDS = {name: field for field, names in KEYS.items() for name in names.split()}

SECTIONS = {
    **dict.fromkeys(("training", "trainer", "train", "job", "experiment"), "run"),
    **dict.fromkeys(("parallelism", "parallel", "distributed"), "mesh"),
    **dict.fromkeys(("dataset", "dataloader", "tokenizer"), "data"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "schedule"),
    **dict.fromkeys(("eval", "evaluation"), "validation"),
    **dict.fromkeys(("logging", "wandb"), "metrics"),
    **{"fp8": "float8", "recompute": "activation_checkpointing", "save": "checkpoint"},
}
"""A section elsewhere -> ours."""

YES = ("yes", "on", "y", "true", "enable", "enabled")
NO = ("no", "off", "n", "false", "disable", "disabled", "none", "null")
OFF = (False, "none", "never", 0)
"""What fields that can be off call it."""
VALUES = {
    **dict.fromkeys(("gpu", "gpus", "nvidia"), "cuda"),
    **dict.fromkeys(("fp8", "float8", "e4m3"), "tensorwise"),
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fa2", "flash2", "flash_attention_2", "flash_attn"), "flash"),
    **dict.fromkeys(("fa3", "flash_attention_3"), "flash3"),
    **dict.fromkeys(("warmup_stable_decay", "trapezoidal"), "wsd"),
    **dict.fromkeys(("all", "block"), "full"),
    **{"sdpa": "auto", "adam": "adamw"},
}
"""A value elsewhere -> ours."""


def is_wish(value: Any) -> bool:
    """Whether the value asks for something without saying what."""
    return value is True or (isinstance(value, str) and value.lower() in YES)


def meanings(value: Any, words: Sequence[str]) -> list[Any]:
    """What may be meant by this value of a field that accepts these words alone or, if there are none, others."""
    if is_wish(value):
        return [True, *(word for word in words if word not in OFF)]
    if value is False:
        return [*OFF]
    known = value.lower().replace("-", "_") if isinstance(value, str) else ""
    return [*(OFF if known in NO else ()), *([VALUES[known]] if known in VALUES else [])]
