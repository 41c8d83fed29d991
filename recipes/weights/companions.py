"""What a Hugging Face folder says besides the model: tokenizer, chat template, special tokens, generation settings.

A run that starts from such a folder keeps these texts in its checkpoints, and exports them. Imports no torch.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.errors import UserError, listed
from recipes.data.text.tokens_beside import (
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    read_beside,
    text_of,
    vocabulary_of,
    with_tokens_beside,
)
from recipes.files.layout import TOKENIZER
from recipes.files.reading import fault, names_in, whole_text

GENERATION_CONFIG = "generation_config.json"
COMPANIONS = (TOKENIZER_CONFIG, SPECIAL_TOKENS, "chat_template.jinja", GENERATION_CONFIG)
OUR_CLASS = "PreTrainedTokenizerFast"
"""The class that reads everything from tokenizer.json; others add tokens of their own."""
ADDING = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
"""Parts of a tokenizer.json that add special tokens around a text."""
SLOW_TOKENIZERS = (
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
)
"""Files of tokenizers that are not a tokenizer.json yet."""
IGNORED = (
    *("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "min_p", "typical_p"),
    *("min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias"),
)
"""Settings of generation that only transformers obeys."""
CONVERT_TOKENIZER = 'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'


def read_companions(folder: Path) -> dict[str, str]:
    """File name -> text of those that a folder has. Raises UserError for one that is damaged."""
    found = read_beside(folder, COMPANIONS)
    _ = generation_ends(found, where=folder), repetition_penalty(found, where=folder)
    return found


def generation_ends(companions: Mapping[str, str], *, where: Path) -> tuple[int, ...]:
    """The tokens that end a generated text by generation_config.json. Raises UserError unless they are token ids."""
    ends = json.loads(companions.get(GENERATION_CONFIG, "{}")).get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise UserError(f"{where / GENERATION_CONFIG}: eos_token_id = {ends!r}: must be token ids")
    return tuple(ends)


def tokenizer_ends(companions: Mapping[str, str], tokenizer: str) -> tuple[int, ...]:
    """The token that ends texts by tokenizer_config.json, if it names one of the tokenizer's."""
    end = text_of(json.loads(companions.get(TOKENIZER_CONFIG, "{}")).get("eos_token"))
    return tuple(number for number, token in token_names(tokenizer).items() if token == end) if end else ()


def repetition_penalty(companions: Mapping[str, str], *, where: Path) -> float:
    """That of generation_config.json. Raises UserError unless it is a number above 0."""
    penalty = json.loads(companions.get(GENERATION_CONFIG, "{}")).get("repetition_penalty")
    if penalty is None:
        return 1.0
    if type(penalty) not in (int, float) or not 0 < penalty < math.inf:
        raise UserError(f"{where / GENERATION_CONFIG}: repetition_penalty = {penalty!r}: must be a number above 0")
    return float(penalty)


def ignored_settings(companions: Mapping[str, str]) -> list[str]:
    """Settings of generation_config.json that change an answer of transformers, but not of our decoder."""
    given = json.loads(companions.get(GENERATION_CONFIG, "{}"))
    return [name for name in IGNORED if given.get(name) not in (None, 0, [])]


def exported_tokenizer_config(kept: Mapping[str, Any], ours: Mapping[str, Any], *, begins: bool) -> dict[str, Any]:
    """The tokenizer_config.json of an export: what came with the weights, and where that says nothing, ours.

    begins: whether the model was trained with a beginning token.
    """
    # tokenizer.json says all of this, and an export brings no code.
    dropped = {"auto_map", "tokenizer_file", "name_or_path"} | (set() if begins else {"add_bos_token", "add_eos_token"})
    return {key: value for key, value in {**ours, **kept}.items() if key not in dropped} | {
        "tokenizer_class": OUR_CLASS
    }


def read_tokenizer(folder: Path) -> str:
    """The text of tokenizer.json, with the tokens beside it. Raises UserError if it is missing or damaged."""
    file = folder / TOKENIZER
    try:
        text = whole_text(file)
        token_names(text)
        return with_tokens_beside(text, file)
    except FileNotFoundError:
        remedy = "copy the tokenizer that the model was trained with into it"
        if slow := sorted(set(names_in(folder)) & {*SLOW_TOKENIZERS}):
            remedy = f"transformers can write one from its {listed(slow)}: {CONVERT_TOKENIZER.format(folder=folder)}"
        raise UserError(f"{folder} has no {TOKENIZER}; {remedy}") from None
    except OSError as error:
        raise fault(f"{file} cannot be read", error) from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is not a tokenizer.json of Hugging Face tokenizers: {error!r}") from None


def token_names(tokenizer: str) -> dict[int, str]:
    """Token id -> token, from the text of a tokenizer.json."""
    content = json.loads(tokenizer)
    return {i: token for token, i in vocabulary_of(content).items()} | {
        added["id"]: added["content"] for added in content.get("added_tokens") or ()
    }


def without_added_tokens(tokenizer: str) -> str:
    """The tokenizer.json without the parts that add special tokens to a text; unchanged if it has none."""
    content = json.loads(tokenizer)
    processor = content.get("post_processor") or {}
    steps = processor.get("processors", ()) if processor.get("type") == "Sequence" else [processor]
    kept = [step for step in steps if step.get("type") not in ADDING]
    if len(kept) == len(steps):
        return tokenizer
    content["post_processor"] = {"type": "Sequence", "processors": kept} if kept else None
    return json.dumps(content, indent=2, ensure_ascii=False)
