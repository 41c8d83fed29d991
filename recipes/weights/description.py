"""What a folder of weights says of its model. Imports no torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from models.config import OF_EXPERTS, PATTERNS, ModelConfig, TextFacts
from models.registry import OURS, PLACES, unregistered
from parallel.errors import UserError
from recipes.files.layout import MODEL, TOKENIZER
from recipes.files.reading import read_text

HF_CONFIG = "config.json"
"""The file that makes a folder a Hugging Face folder."""
UNCHECKED = ("name", "init_std", "weights", "config", "dropout", "upcycle")
"""Fields of a model that may differ from those its weights were trained with."""
IMMATERIAL = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Keys of a config.json that may differ likewise."""
LLAMA3_ROPE = ("rope_factor", "rope_low_frequency_factor", "rope_high_frequency_factor", "rope_original_length")
YARN = ("rope_beta_fast", "rope_beta_slow", "rope_attention_factor", "rope_truncate", "rope_scaled_layers")


@dataclass(frozen=True)
class Description:
    """What every program that uses weights must know about them."""

    model: ModelConfig
    facts: TextFacts
    tokenizer: str
    """The text of tokenizer.json."""
    companions: Mapping[str, str] = field(default_factory=dict)
    """File name -> text of what came with the weights: chat template, special tokens, generation settings."""
    begins: bool = False
    """Whether the tokenizer adds tokens to a text although facts.bos_token_id is None."""
    plugins: Mapping[str, Any] = field(default_factory=dict)
    """The section [plugins] of the run, and whether its model cannot be built without them, as `build_models`."""

    def ends(self, *, where: Path) -> tuple[int, ...]:
        """Every token that may end a text, by config.json, generation settings and tokenizer_config.json. where: they
        are from."""
        from recipes.weights.companions import generation_ends, tokenizer_ends

        given = self.facts.eos_token_id
        ends = given if isinstance(given, tuple) else () if given is None else (given,)
        named = tokenizer_ends(self.companions, self.tokenizer)
        return tuple(dict.fromkeys((*ends, *generation_ends(self.companions, where=where), *named)))


def checkpoint_files(description: Description) -> dict[str, str]:
    """Name -> text of the files that describe the model in a checkpoint."""
    # Where it came from is not part of the model.
    model = replace(description.model, weights="", config="", upcycle=False)
    content: dict[str, Any] = {"model": asdict(model), "text": asdict(description.facts)}
    content |= {"plugins": description.plugins} if description.plugins else {}
    return {MODEL: json.dumps(content, indent=2) + "\n", TOKENIZER: description.tokenizer, **description.companions}


def read_description(folder: Path) -> tuple[ModelConfig, TextFacts]:
    """The contents of model.json. Raises UserError."""
    from pydantic import TypeAdapter, ValidationError

    file = folder / MODEL
    try:
        content = json.loads(read_text(file))
        kind = ModelConfig
        if "definition" in content["model"]:
            from models.transformers_config import TransformersConfig

            kind = TransformersConfig
        if (plugins := content.get("plugins", {})).get("build_models"):
            from recipes.plugins.loading import load_recorded

            missing = [*load_recorded(plugins["modules"], plugins["versions"], file=file)]
            if missing and any(unregistered(place, content["model"].get(place, OURS)) for place in PLACES):
                raise type(missing[0])("\n".join(map(str, missing)))
        model = TypeAdapter(kind).validate_python(content["model"])
        if problems := model.problems():
            raise ValueError("; ".join(f"{name} {message}" for name, message in problems))
        if model.by_transformers:
            from models.hf_config import require_known

            require_known(model.settings)
        return model, TypeAdapter(TextFacts).validate_python(content["text"])
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} does not describe a model of this version: {error}") from None


def upcycling_problems(model: ModelConfig, dense: ModelConfig) -> Iterator[tuple[str, str]]:
    """(field, message) of what keeps experts from starting as the feed-forwards of a dense model.

    Each is a whole one, as in Komatsuzaki et al. 2022: then scores that add up to 1 give what the dense model gives.
    """
    if not model.experts:
        yield "upcycle", "is for a model with experts; write experts = 8 or so, or false"
    elif dense.experts:
        yield "upcycle", "is for the weights of a dense model, but these have experts; write false"
    elif model.expert_width != (width := dense.feed_forward_width):
        yield "expert_width", f"must be {width}, the whole feed-forward that each expert starts as; write that"
    elif model.shared_experts:
        yield "shared_experts", "would be added to what the dense model computes; write 0"
    elif model.biases:
        yield "biases", "would be of experts that start as feed-forwards without them; write false"
    elif not model.normalize_scores:
        yield "normalize_scores", "must be true, so that scores add up to 1 and the model begins as the dense one"
    elif model.router_scale != 1:
        yield "router_scale", "must be 1, so that the model begins as the dense one; write 1"


def differences(model: ModelConfig, stored: ModelConfig) -> Iterator[tuple[str, Any]]:
    """(field, its value in `stored`) for every field in which a model differs from the one its weights belong to.

    For a model of transformers: key of config.json.
    """
    if model.by_transformers and stored.by_transformers:
        ours, theirs = model.settings, stored.settings
        keys = (key for key in {**theirs, **ours} if key not in IMMATERIAL)
        yield from ((key, theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key))
        return
    # Which layers have rotary embeddings and windows counts, not how that is said.
    patterns, skipped = dict(PATTERNS), {*UNCHECKED}.union(*PATTERNS.values())
    if not (model.experts and stored.experts):  # upcycling_problems() has the rest
        del patterns["is_sparse"]
        skipped |= {one.name for one in fields(ModelConfig) if one.name.startswith(OF_EXPERTS)}
        skipped -= set() if model.upcycle else {"experts"}
    skipped |= {"expert_groups_by"} if model.expert_groups == stored.expert_groups == 1 else set()
    if model.rope_scaling == "none" or stored.rope_scaling == "none":
        skipped |= {*LLAMA3_ROPE, *YARN}
    checked = [one.name for one in fields(ModelConfig) if one.name not in skipped]
    layers = range(min(model.layers, stored.layers))
    for pattern, names in patterns.items():
        both = [[getattr(one, pattern)(layer) for layer in layers] for one in (model, stored)]
        checked += names if both[0] != both[1] else ()
    yield from ((name, theirs) for name in checked if getattr(model, name) != (theirs := getattr(stored, name)))
