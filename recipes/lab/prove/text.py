"""Random words for twins: documents, or prompts with answers, and a tokenizer whose tokens they are. Imports no torch."""

import json
import random
from pathlib import Path

from recipes.files.atomic import write_whole

TEXT, TOKENIZER = "text.jsonl", "tokenizer.json"
WORDS = 94
"""Different words. With the end of a document, they leave rows of the vocabulary that no token has."""
END = "<|endoftext|>"
DOCUMENTS = 600


def write_words(folder: Path) -> None:
    """Write both files. Fields "text", "prompt" and "answer" of a row are of 2 to 40 words."""
    draw = random.Random(0)
    words = [f"w{number}" for number in range(WORDS)]

    def some(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(2, most)))

    rows = ({"text": some(40), "prompt": some(12), "answer": some(12)} for _ in range(DOCUMENTS))
    vocabulary = {END: 0} | {word: number for number, word in enumerate(words, start=1)}
    added = {"id": 0, "content": END, "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        "added_tokens": [added],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / TEXT, "".join(f"{json.dumps(row)}\n" for row in rows))
    write_whole(folder / TOKENIZER, json.dumps(tokenizer))
