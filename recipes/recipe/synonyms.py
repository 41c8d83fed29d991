"""What is wrong with the names and values of a recipe, and what was probably meant: what other programs and people
call its fields and values. Imports no torch."""

import re
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

import tomli

from parallel.errors import listed
from recipes.files.reading import shorten
from recipes.recipe.fields import LARGEST, accepts, beyond_toml, describe, field_types, sections, toml, value_of
from recipes.recipe.schema import Recipe

VALUE_WORDS = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "a list", dict: "a table"}
EXAMPLES = {
    "data.mixture": {"web.jsonl": 0.7, "code.jsonl": 0.3},
    "validation.sources": {"web": "held-out/web.jsonl", "code": "held-out/code.jsonl"},
}
"""Examples for fields whose default is not a useful one."""

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


def wrong_value(key: str, value: Any, kinds: Sequence[str], *, flag: bool) -> str:
    """As complaint(), of a value that the field refuses for reasons of these kinds, which are pydantic's."""
    annotation = field_types()[key]
    rule = f"must be {describe(annotation)}"
    if "finite_number" in kinds:
        rule = rule.replace("a number", "a finite number")
    of_right_type = any("_than" in kind or kind == "finite_number" for kind in kinds)
    of_right_type = of_right_type or (get_origin(annotation) is tuple and isinstance(value, list))
    if kinds[0].endswith("_type") and not flag and not of_right_type:
        rule += f", and {shorten(toml(value))} is {VALUE_WORDS.get(type(value), 'a ' + type(value).__name__)}"
    if beyond_toml(value):
        rule += f" and < {LARGEST}" if of_right_type else ""
    close = [candidate for candidate in _readings(annotation, value) if accepts(annotation, candidate)]
    if not close and (is_wish(value) or annotation is bool or get_origin(annotation) is Literal):
        return rule  # says all that there is; the default would be one answer to any wish
    instead = close[0] if close else EXAMPLES.get(key, value_of(Recipe(), key))
    example = "" if close else "for example "
    if flag:
        instead = [word for item in instead.items() for word in item] if isinstance(instead, dict) else instead
        words = instead if isinstance(instead, list | tuple) else [instead]
        typed = " ".join(str(word).lower() if isinstance(word, bool) else str(word) for word in words)
        return f"{rule}; write {example}--{key} {typed}".rstrip()
    return f"{rule}; write {example}{key.partition('.')[2]} = {toml(instead)}"


def _readings(annotation: Any, value: Any) -> list[Any]:
    """What the user may have meant by a value of the wrong type, most likely first."""
    choices = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
    words = [word for choice in choices if get_origin(choice) is Literal for word in get_args(choice)]
    readings = meanings(value, words if choices == (annotation,) else ())
    if isinstance(value, str):
        for text in (value, value.lower()):  # "3e-4", "True"
            with suppress(ValueError):
                readings.append(tomli.loads(f"v = {text}")["v"])
        readings += get_close_matches(value.lower(), words, n=1, cutoff=0.5)
    readings += [int(x) for x in (value, *readings) if isinstance(x, float) and x.is_integer()]  # 1e3
    if get_origin(annotation) is tuple and not isinstance(value, list | dict):
        readings += [[x] for x in (value, *readings)]
    elif isinstance(value, list) and len(value) == 1:
        readings += value
    if isinstance(value, int | float):
        readings += [str(value), *([bool(value)] if value in (0, 1) else [])]
    return readings


def unknown_section(name: str) -> str:
    """The message for a [section] that does not exist."""
    if message := _of_other_programs(name, "section"):
        return message
    close = [SECTIONS[_normal(name)]] if _normal(name) in SECTIONS else []
    close = close or get_close_matches(_normal(name), sections(), n=1)
    hint = f"did you mean [{close[0]}]?" if close else f"the sections are {listed(sections())}"
    return f"unknown section; {hint}"


def unknown_key(key: str) -> str:
    """The message for a dotted or bare key that does not exist."""
    section, _, name = _normal(key).rpartition(".")
    if name == "base":
        return 'unknown key; base = "other.toml" belongs in a file, above its first [section]'
    if name in sections() and not section:
        return f"is a section; its keys are {listed(key for key in field_types() if key.startswith(name + '.'))}"
    if message := _of_other_programs(name, "key"):
        return message
    names = {known: known.partition(".")[2] for known in field_types()}
    of_section = {bare: known for known, bare in names.items() if known.startswith(section + ".")}
    if name in of_section:
        return f"unknown key; did you mean {of_section[name]}?"
    elsewhere = [known for known, bare in names.items() if bare == name]
    if not elsewhere and (close := get_close_matches(name, of_section, n=1)):
        elsewhere = [of_section[close[0]]]
    if not elsewhere:
        close = get_close_matches(name, set(names.values()), n=2, cutoff=0.7)
        elsewhere = [known for known, bare in names.items() if bare in close]
    if elsewhere:
        return f"unknown key; did you mean {listed(elsewhere, last='or')}?"
    if of_section:
        return f"unknown key; [{section}] has {listed(of_section)}"
    return f"unknown key; every key belongs to a section: {listed(sections())}"


def _of_other_programs(name: str, what: str) -> str | None:
    """The message for what other programs call learning_rate, tp, cp_size, pp, ...; None for other names."""
    name = _normal(name)
    field = FIELDS.get(name) or FIELDS.get(re.sub("(_degree|_size)?$", "", name, count=1))
    return f"unknown {what}; did you mean {field}?" if field else None


def _normal(name: str) -> str:
    return name.replace("-", "_").lower()
