"""What transformers knows of a tokenizer from the files beside its tokenizer.json: further added tokens, and the one
that ends texts. It is written into the text, which alone is kept with tokens and weights. Imports no torch."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.files.layout import MODEL, TOKENIZER
from recipes.files.reading import json_object, names_in, read_patiently, read_whole

TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MAX_BYTES = 10_000_000
"""The largest of these files."""
WHOLE = {MODEL, "owner.txt"}
"""Files of our checkpoints and shards, whose tokenizer.json says everything: what they were made with."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a name, in the order in which transformers adds them."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
REFUSED = {"split_special_tokens": False, "fast_tokenizer_files": None}
"""Settings that make other tokens of a text, and the values without an effect."""
# In order of preference: GPT-2 and SmolLM2, SmolLM3 and Llama 3; then Llama 2, chat models. The latter end documents
# unless tokenizer_config.json names another token.
CERTAIN_ENDS, OTHER_ENDS = ("<|endoftext|>", "<|end_of_text|>"), ("</s>", "<|im_end|>")
ENDS = "ends_documents"
"""Our mark of an added token in tokenizer.json, which the library ignores."""
OBEYS_PREFIX_SPACE = ("GPT2Tokenizer", "RobertaTokenizer")
"""Classes of transformers whose add_prefix_space overrides tokenizer.json; their names may end in Fast."""

Token = dict[str, Any]
"""Its "content" and FLAGS."""


def with_tokens_beside(text: str, file: Path) -> str:
    """The text of a tokenizer.json with the tokens that transformers adds to it from the files beside it, without the
    dropout of BPE; unchanged if there is nothing of that. Raises UserError for a file that cannot be used."""
    folder = file.parent
    names = {*names_in(folder)} if file.name == TOKENIZER else set[str]()
    try:
        content = json_object(text)
        own = [_token(added) for added in content.get("added_tokens") or ()]
    except (ValueError, TypeError, KeyError, AttributeError):
        return text  # whoever reads it says so
    if WHOLE & names:
        return text
    if isinstance(content.get("model"), dict) and content["model"].get("dropout"):
        content["model"]["dropout"] = None
        text = json.dumps(content, ensure_ascii=False)
    found = read_beside(folder, {TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS} & names)
    config, special, added = (
        json.loads(found.get(name, "{}")) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
    )
    if asked := [name for name, usual in REFUSED.items() if config.get(name, usual) != usual]:
        raise UserError(f"{folder / TOKENIZER_CONFIG}: {asked[0]} is not supported; take it out")
    split, prefix = content.get("pre_tokenizer"), config.get("add_prefix_space")
    overrides = str(config.get("tokenizer_class")).removesuffix("Fast") in OBEYS_PREFIX_SPACE and prefix is not None
    if overrides and isinstance(split, dict) and split.get("add_prefix_space", prefix) != prefix:
        raise UserError(f"{folder}: add_prefix_space differs in {TOKENIZER_CONFIG} and {TOKENIZER}; write one of them")
    try:
        missing = [*_missing(config, special, added, own, content)]
    except (ValueError, TypeError, KeyError, AttributeError):
        where = " or ".join(str(folder / name) for name in found)
        raise UserError(f"{where} cannot be used: its tokens are not as transformers writes them") from None
    return _with_end(_with_added(text, content, missing) if missing else text, text_of(config.get("eos_token")))


def _with_end(text: str, end: str) -> str:
    """The text with a mark at this added token, unless documents end with it or a certain one anyway. Gemma has a token
    </s>, which is HTML there."""
    if not end:
        return text
    content = json.loads(text)
    added, words = {token["content"]: token for token in content.get("added_tokens") or ()}, dict[str, int]()
    with suppress(ValueError, TypeError, KeyError, AttributeError):  # whoever reads it says so
        words = vocabulary_of(content)
    usual = next((name for name in (*CERTAIN_ENDS, *OTHER_ENDS) if name in added or name in words), None)
    if end not in added or usual == end or usual in CERTAIN_ENDS:
        return text
    added[end][ENDS] = True
    return json.dumps(content, ensure_ascii=False)


def vocabulary_of(content: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id of the model in a tokenizer.json, without added tokens. Raises KeyError, TypeError or ValueError for
    anything else."""
    entries = content["model"]["vocab"]  # Unigram models list (token, score) pairs, all others map token to id
    return {token: number for number, (token, _) in enumerate(entries)} if isinstance(entries, list) else dict(entries)


def without_mark(text: str) -> str:
    """The text of a tokenizer.json for others, whose readers would warn of our mark."""
    if ENDS not in text:
        return text
    content = json.loads(text)
    for token in content["added_tokens"]:
        token.pop(ENDS, None)
    return json.dumps(content, indent=2, ensure_ascii=False)


def text_of(token: Any) -> str:
    """The text of a special token, as these files have it, by itself or with its flags; "" for anything else."""
    return token if isinstance(token, str) else str(token.get("content", "")) if isinstance(token, dict) else ""


def read_beside(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """File name -> text of those of these files that are in the folder; of .json files, one JSON object. Raises
    UserError."""
    found = {}
    for name in names:
        file = folder / name
        try:
            found[name] = read_patiently(partial(read_whole, file, most=MAX_BYTES), what=str(file)).decode()
            if name.endswith(".json"):
                json_object(found[name])
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{file} cannot be used: {reason}; copy it again, or do without it: delete it") from None
    return found


def _token(given: Any, *, special: bool = False) -> Token:
    """A token with the flags that it has where it is given by its name, or without some of them."""
    given = {"content": given} if isinstance(given, str) else given
    special = special or bool(given.get("special"))
    usual = dict.fromkeys(FLAGS, False) | {"normalized": not special}
    found = usual | {key: value for key, value in given.items() if key in FLAGS} | {"special": special}
    if not isinstance(given["content"], str) or not all(isinstance(found[flag], bool) for flag in FLAGS):
        raise ValueError(f"{str(given)[:100]}")
    return found | {"content": given["content"]}


def _missing(
    config: dict[str, Any], special: dict[str, Any], added: dict[str, Any], own: list[Token], content: dict[str, Any]
) -> Iterator[Token]:
    """The tokens that tokenizer.json lacks or has with other flags, in the order in which transformers adds them."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    texts = (name for name, value in config.items() if name.endswith("_token") and isinstance(value, str))
    named = {name: config[name] for name in (*texts, *NAMED) if config.get(name)}
    beside: dict[int, Token] = {}
    if "added_tokens_decoder" in config:
        beside = {int(number): _token(token) for number, token in config["added_tokens_decoder"].items()}
    else:  # as transformers read and wrote them before there was this key
        named |= {name: _token(value, special=True) for name, value in special.items() if name.endswith("_token")}
        extra = [*extra, *special.get("extra_special_tokens", [])] if isinstance(extra, list) else extra
        contents = {_token(token)["content"] for token in (*named.values(), *extra)}
        beside = {number: _token(name, special=name in contents) for name, number in added.items()}
        beside |= {token["id"]: _token(token) for token in content.get("added_tokens") or ()}
        extra = extra or special.get("additional_special_tokens", [])
    if isinstance(extra, dict):
        named, extra = named | extra, []
    if not named.keys() - {*NAMED}:
        named |= config.get("model_specific_special_tokens") or {}
    order = sorted(named, key=lambda name: NAMED.index(name) if name in NAMED else len(NAMED))
    specials = [_token(token, special=True) for token in (*(named[name] for name in order), *extra)]
    names = {token["content"] for token in specials[: len(named)]}
    known = {token["content"] for token in (*own, *beside.values())}
    for _, token in sorted(beside.items()):
        if token not in own:
            yield token | {"special": token["special"] or token["content"] in names}
    for token in specials:
        if token["content"] and token["content"] not in known:
            known.add(token["content"])
            yield token


def _with_added(text: str, content: dict[str, Any], missing: Iterable[Token]) -> str:
    """The tokenizer.json with these tokens, and the ids that the library gives them."""
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_str(text)
    except Exception:  # whoever builds it says so
        return text
    library.add_tokens([tokenizers.AddedToken(**token) for token in missing])
    added = json.loads(library.to_str())["added_tokens"]
    if added == content.get("added_tokens"):
        return text
    return json.dumps(content | {"added_tokens": added}, ensure_ascii=False)
