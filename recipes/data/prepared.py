"""Folders of prepared shards, as a run finds them. Imports no torch."""

from collections.abc import Callable
from pathlib import Path

from parallel.errors import UserError
from recipes.data.text.sources import file_size
from recipes.data.text.tokenizer import Tokenizer, build_tokenizer
from recipes.data.tokens.shards import TOKENIZER, TRAIN, Index, array_path, open_index, read_index
from recipes.data.tokens.workspace import VERIFY_UP_TO_BYTES, damage
from recipes.files.reading import is_remote, user_path, whole_text


def prepared_folder(source: str, cache: Path, *, log: Callable[[str], None]) -> Path:
    """The folder of prepared tokens: of those at a server, a copy in the cache, for which every byte is verified."""
    if not is_remote(source):
        return user_path(source)
    from recipes.files.local_copy import local_copy

    def check(folder: Path) -> None:
        index = read_index(folder)
        for shard in index.shards if index else ():
            if problem := damage(folder, shard):
                raise UserError(f"data.source: '{source}' is damaged: {problem}; prepare it again")

    return local_copy(source, cache, check=check, log=log)


def prepared_index(
    folder: Path, tokenizer: Tokenizer, validation_fraction: float, *, verify: bool, setting: str, pairs: str = ""
) -> Index:
    """The index of prepared shards. Raises UserError if they do not match the recipe or are damaged. verify: compare
    them with their checksums. setting: names the source in the recipe. pairs: as Index.pairs."""
    index = open_index(str(folder))
    if index.tokenizer_fingerprint != tokenizer.fingerprint:
        if beginning := _other_beginning(folder, index, tokenizer):
            raise UserError(beginning)
        other = f"'{folder}' holds tokens of another tokenizer"
        if setting == "data.source":
            raise UserError(f'data.tokenizer: {other}; write tokenizer = "{folder / TOKENIZER}"')
        raise UserError(f"{setting}: {other} than the training text; prepare it with that one, or give its text")
    if index.validation_fraction != validation_fraction and setting == "data.source":
        raise UserError(
            f"data.validation_fraction: '{folder}' was prepared with {index.validation_fraction}; write that, or"
            " prepare the folder again"
        )
    size = 0
    for shard in index.shards if verify else ():
        size += file_size(array_path(folder, shard.number, TRAIN))
        if size <= VERIFY_UP_TO_BYTES and (problem := damage(folder, shard)):
            raise UserError(f"{setting}: '{folder}' is damaged: {problem}; prepare it again")
    if index.pairs != pairs:
        from recipes.data.text.pair_format import prepared_otherwise

        if problem := prepared_otherwise(index.pairs, pairs):
            raise UserError(f"{setting}: '{folder}' {problem}")
    return index


def _other_beginning(folder: Path, index: Index, tokenizer: Tokenizer) -> str | None:
    """What to write if the tokens differ from the recipe's in the token that begins documents alone, or None."""
    from recipes.data.text.beginning import with_beginning

    where = folder / TOKENIZER
    try:
        if tokenizer.beginning is None:
            if index.tokenizer_fingerprint == with_beginning(tokenizer).fingerprint:
                return f"data.bos: '{folder}' was prepared with --bos; write bos = true"
            return None
        if with_beginning(build_tokenizer(whole_text(where), where=where)).fingerprint == tokenizer.fingerprint:
            return f"data.bos: '{folder}' was prepared without --bos; write bos = false, or prepare it again with --bos"
    except (OSError, UnicodeDecodeError, UserError):
        pass  # it is of another tokenizer
    return None
