"""What --check finds out from the built model, on the meta device: what the run would refuse before its first step."""

import json
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.recipe.load import load_run
from recipes.training.check import look_at_first_rows

SIZES = {"vocab_size": 512, "hidden_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "n_positions": 64, "word_embed_proj_dim": 64, "ffn_dim": 96}
SIZES |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
FLOAT8 = ("--float8.recipe=tensorwise", "--float8.emulate=true")


def verdict(folder: Path, family: str, *arguments: str, **keys: Any) -> str:
    """What --check says of a recipe for a family of transformers."""
    (folder / "config.json").write_text(json.dumps({**SIZES, "model_type": family, **keys}))
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[model]\nname = "from_config"\nconfig = "{folder}"\n[run]\ndevice = "cpu"\n')
    flags = ("--data.tokenizer=train:512", "--batch.sequence_length=64", *arguments)
    return look_at_first_rows(load_run(recipe, flags))


@pytest.mark.parametrize("family", ["bloom", "opt", "falcon"])
def test_document_masks_are_refused_where_documents_would_meet(family: str, tmp_path: Path) -> None:
    keys = {"alibi": True} if family == "falcon" else {}
    assert verdict(tmp_path, family, **keys).startswith("ok")
    with pytest.raises(UserError, match=r"write data.document_mask = false"):
        verdict(tmp_path, family, "--data.document_mask=true", **keys)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lets tokens see later ones"):
        verdict(tmp_path, "gpt2", is_causal=False)


@pytest.mark.parametrize(("name", "is_known"), [("c_attn", True), ("lm_head", True), ("c_atn", False)])
def test_names_to_exclude_from_float8_are_those_of_its_linears(name: str, is_known: bool, tmp_path: Path) -> None:
    if is_known:
        assert verdict(tmp_path, "gpt2", *FLOAT8, f"--float8.exclude={name}").startswith("ok")
    else:
        with pytest.raises(UserError, match=r"names \['c_atn'\], but no linear is called so: .*c_attn"):
            verdict(tmp_path, "gpt2", *FLOAT8, f"--float8.exclude={name}")


def test_a_kernel_that_the_family_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'write attention.backend = "auto"'):
        verdict(tmp_path, "bloom", "--attention.backend=math")
