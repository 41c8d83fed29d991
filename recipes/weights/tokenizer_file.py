"""The tokenizer.json of a folder of weights. Imports no torch."""

import json
from pathlib import Path

from parallel.errors import UserError, listed
from recipes.files.layout import TOKENIZER
from recipes.files.reading import fault, names_in

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
CONVERT_TOKENIZER = 'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'


def read_tokenizer(folder: Path) -> str:
    """The text of tokenizer.json. Raises UserError if it is missing or damaged."""
    file = folder / TOKENIZER
    try:
        text = file.read_text(encoding="utf-8")
        token_names(text)
        return text
    except FileNotFoundError:
        remedy = "copy the tokenizer that the model was trained with into it"
        if slow := sorted(set(names_in(folder)) & {*SLOW_TOKENIZERS}):
            remedy = f"transformers can write one from its {listed(slow)}: {CONVERT_TOKENIZER.format(folder=folder)}"
        raise UserError(f"{folder} has no {TOKENIZER}; {remedy}") from None
    except OSError as error:
        raise fault(f"{file} cannot be read", error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is not a tokenizer.json of Hugging Face tokenizers: {error!r}") from None


def token_names(tokenizer: str) -> dict[int, str]:
    """Token id -> token, from the text of a tokenizer.json."""
    content = json.loads(tokenizer)
    entries = content["model"]["vocab"]  # Unigram models list (token, score) pairs, all others map token to id
    pairs = ((token, i) for i, (token, _) in enumerate(entries)) if isinstance(entries, list) else entries.items()
    return {i: token for token, i in pairs} | {
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
