"""Text by the generate() of transformers, from the model that it reads in an exported folder: for models that it
defines, and for what models/cache.py has no code for: beams, and several texts at once."""

import copy
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from models.hf_config import INSTALL
from parallel.errors import UserError
from parallel.kernels import without_plans
from recipes.evaluation.opened import OpenedModel, Sampling
from recipes.files.border import foreign
from recipes.weights.convert import export_checkpoint, require_finite
from recipes.weights.locate import Weights


def open_exported(weights: Weights, *, dtype: torch.dtype, device: torch.device) -> OpenedModel:
    """The model as transformers reads it. A checkpoint is exported to a temporary folder first. Raises UserError."""
    try:
        from models.transformers import read_folder
    except ImportError:
        raise UserError(INSTALL) from None
    tokenizer, reads_prompts = weights.tokenizer, weights.model_in(str(dtype)).is_encoder_decoder
    with TemporaryDirectory(prefix="shardwright-") as place:
        folder = weights.path
        if weights.is_checkpoint:
            folder = Path(place) / "exported"
            export_checkpoint(weights.path, folder, dtype=dtype)
        else:
            weights.stored_tensors  # noqa: B018  raises what transformers would only warn of
        with foreign(f"transformers cannot read {weights.path}"):
            model = read_folder(folder, dtype=dtype, device=device)
    require_finite({f"{name} in {weights.path}": values for name, values in model.named_parameters()})
    ends = weights.description.ends(where=weights.path)
    return OpenedModel(model, tokenizer, weights.facts_of_text, ends, encoder_decoder=reads_prompts)


def check_search(*, beams: int, outputs: int, temperature: float | None) -> None:
    """Raises UserError for values that do not go together. temperature: None = the default, which samples."""
    if beams < 1 or outputs < 1:
        name, value = ("beams", beams) if beams < 1 else ("outputs", outputs)
        raise UserError(f"{name} = {value}: must be 1 or more")
    if outputs > beams and (beams > 1 or temperature == 0):
        sampled = ", or sample: --temperature 0.8" if beams == 1 else ""
        found = "one beam finds one text" if beams == 1 else f"{beams} beams find no more than {beams} texts"
        raise UserError(f"outputs = {outputs}: {found}; write --beams {outputs}{sampled}")


@torch.no_grad()
def texts_of(
    opened: OpenedModel, prompt_ids: Sequence[int], sampling: Sampling, *, beams: int, outputs: int
) -> list[list[int]]:
    """The tokens of each text after the prompt, the best first, without the token that ends it.

    Generation settings that came with the model hold for what is not an argument here, such as a repetition penalty.

    Args:
        opened: what open_exported() returned.
        prompt_ids: tokens of the prompt.
        sampling: how tokens are drawn.
        beams: how many texts are followed at once.
        outputs: how many texts to return.
    """
    model, ends = cast(Any, opened.model), opened.stop_ids()
    settings = copy.deepcopy(model.generation_config)
    sampled = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    settings.update(
        do_sample=sampling.temperature > 0,
        **(sampled if sampling.temperature else dict.fromkeys(sampled)),
        num_beams=beams,
        num_return_sequences=outputs,
        max_length=None,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=sorted(ends),
        pad_token_id=min(ends) if settings.pad_token_id is None else settings.pad_token_id,
    )
    prompt = torch.tensor([list(prompt_ids)], device=model.device)  # (1, T)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else [], device_type=model.device.type):
        torch.manual_seed(sampling.seed)
        with foreign("transformers cannot generate with these options and generation_config.json"), without_plans():
            rows = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    begin = 1 if opened.encoder_decoder else len(prompt_ids)  # an answer begins after the token that starts a decoder
    return [[*takewhile(lambda token: token not in ends, row[begin:])] for row in rows.tolist()]
