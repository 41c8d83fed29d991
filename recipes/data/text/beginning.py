"""The token that begins documents, where data.bos asks for one. Imports no torch."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import xxhash

from parallel.errors import TemporaryError, UserError
from recipes.data.text.tokenizer import Tokenizer, read_tokenizer, text_library, tokenizer_file, training_size
from recipes.data.text.tokens_beside import vocabulary_of

# Llama 3 and SmolLM3, Gemma (where <s> is HTML), Llama 2 and Mistral, Cohere, others: looked for where the
# post-processor adds none.
NAMES = ("<|begin_of_text|>", "<bos>", "<s>", "<BOS_TOKEN>", "<|bos|>", "[BOS]")
REMEDY = "write bos = false, or give a tokenizer that has one"


def with_beginning(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer that begins every document with its beginning-of-sequence token. Its tokenizer.json adds the token,
    too, so that what is exported begins texts as the model was trained. Raises UserError if it has no such token.

    Only tokenizer.json is read, not the tokenizer_config.json beside it: prepared folders, checkpoints and the cache
    hold the former alone, and the same file must mean the same tokens everywhere.
    """
    if tokenizer.beginning is not None:
        return tokenizer
    content = json.loads(tokenizer.json)
    name, number = _beginning(content)
    if number == tokenizer.end_of_document:
        raise UserError(
            f"data.bos: {name!r} ends documents, so it cannot begin them, too: borders would be ambiguous; {REMEDY}"
        )
    text = tokenizer.json
    if tokenizer.ids("a", special=True) != [number, *tokenizer.ids("a")]:
        text = json.dumps(_adding(content, name, number), ensure_ascii=False)
    identity = xxhash.xxh3_128_hexdigest(repr(("bos", text)).encode())  # one that adds the token needs another, too
    return replace(tokenizer, json=text, beginning=number, fingerprint=identity, backend=text_library(text))


def beginning_problem(spec: str) -> str | None:
    """Why data.tokenizer has no token that begins documents and what to write instead, or None. Reads plain JSON."""
    try:
        if training_size(spec) is not None:
            return f"{spec!r} trains a tokenizer without a token that begins a text; {REMEDY}"
        _beginning(json.loads(read_tokenizer(tokenizer_file(spec))))
    except TemporaryError:
        raise
    except UserError as error:
        return str(error).removeprefix("data.bos: ") if str(error).startswith("data.bos: ") else None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # no tokenizer.json: the rule about data.tokenizer says so
    return None


def _beginning(content: dict[str, Any]) -> tuple[str, int]:
    """Name and id of the token: what the post-processor puts first, or else the first of NAMES. Raises UserError."""
    if first := added_beginning(content):
        return first
    ids = {added["content"]: added["id"] for added in content.get("added_tokens") or ()}
    vocabulary = vocabulary_of(content)
    for name in NAMES:
        if (number := ids.get(name, vocabulary.get(name))) is not None:
            return name, number
    raise UserError(
        f"data.bos: the tokenizer has no token that begins a text: its post-processor adds none, and there is no"
        f" {', '.join(NAMES)}; {REMEDY}"
    )


def added_beginning(content: dict[str, Any]) -> tuple[str, int] | None:
    """Name and id of the token that the post-processor of a tokenizer.json puts first; None = it puts none."""
    for processor in _processors(content.get("post_processor")):
        if processor.get("type") == "TemplateProcessing":
            first = processor["single"][0].get("SpecialToken")
            if first:
                return first["id"], processor["special_tokens"][first["id"]]["ids"][0]
    return None


def _processors(processor: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if processor and processor.get("type") == "Sequence":
        for inner in processor["processors"]:
            yield from _processors(inner)
    elif processor:
        yield processor


def _adding(content: dict[str, Any], name: str, number: int) -> dict[str, Any]:
    """The tokenizer.json with a post-processor that puts this token first, and nothing last. Its text is part of the
    fingerprint of prepared folders and runs: it stays as it is."""
    special = {"SpecialToken": {"id": name, "type_id": 0}}
    first, second = ({"Sequence": {"id": text, "type_id": number}} for number, text in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, second],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }
    kept = [one for one in _processors(content.get("post_processor")) if one.get("type") == "ByteLevel"]
    return content | {"post_processor": {"type": "Sequence", "processors": [*kept, template]} if kept else template}
