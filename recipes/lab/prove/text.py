"""Random words for twins, and a tokenizer whose tokens they are. Imports no torch."""

import json
import random
from pathlib import Path

from recipes.data.text.tokenizer import END_OF_DOCUMENT
from recipes.files.atomic import write_whole

TEXT, OTHER, TOKENIZER = "text.jsonl", "other.jsonl", "tokenizer.json"
WORDS = 95
"""Tokens, with the end of a document. A twin's vocabulary has rows that no token has."""


FEW = 16
"""Words of the other text of a mixture. A row with others is not of it; a test looks for one of TEXT without others."""


def write_words(folder: Path) -> None:
    """Write the files. Fields "text", "prompt" and "answer" of a row are of 2 to 40 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    draw, words = random.Random(0), {END_OF_DOCUMENT: 0} | {f"w{number}": number for number in range(1, WORDS)}

    def some(most: int, of: int) -> str:
        return " ".join(draw.choices([*words][1 : of + 1], k=draw.randint(2, most)))

    def rows(of: int) -> str:
        found = ({"text": some(40, of), "prompt": some(12, of), "answer": some(12, of)} for _ in range(600))
        return "".join(f"{json.dumps(row)}\n" for row in found)

    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    write_whole(folder / TEXT, rows(WORDS - 1))
    write_whole(folder / OTHER, rows(FEW))
    write_whole(folder / TOKENIZER, tokenizer.to_str())
