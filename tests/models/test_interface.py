"""What a model declares to parallel/, and that nobody else spells it."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from models.config import LINEARS, LINEARS_IN
from models.decoder import Block, Decoder
from models.interface import blocks_of, require_interface
from models.sizes import SIZES

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("parallel", "recipes", "scripts")


@pytest.mark.parametrize("tied", [True, False])
def test_every_name_of_the_interface_leads_to_its_module(tied: bool) -> None:
    with torch.device("meta"):
        model = Decoder(replace(SIZES["llama3_debug"], layers=3, tied_embeddings=tied))
    assert blocks_of(model) == list(model.blocks) and all(isinstance(block, Block) for block in model.blocks)
    assert model.get_submodule(model.interface.embedding) is model.embedding
    assert model.get_submodule(model.interface.head_norm) is model.norm
    assert model.interface.head == (None if tied else "lm_head")
    assert isinstance(model.get_submodule(model.interface.head or "embedding"), nn.Linear | nn.Embedding)


def test_what_an_interface_names_and_the_model_lacks_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Decoder(replace(SIZES["llama3_debug"], layers=1))
    require_interface(model)
    wrong = replace(model.interface, head_norm="last_norm", loss="cross_entropy")
    monkeypatch.setattr(Decoder, "interface", wrong)
    with pytest.raises(ValueError, match="names what Decoder lacks: cross_entropy, last_norm"):
        require_interface(model)
    with pytest.raises(ValueError, match="Linear declares no interface"):
        require_interface(nn.Linear(2, 2))


def test_names_of_linears_without_torch_are_those_of_a_block() -> None:
    with torch.device("meta"):
        model = Decoder(SIZES["llama3_debug"])
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    assert [name.rpartition(".")[2] for name in names] == [*LINEARS] * len(model.blocks)
    for part, inside in LINEARS_IN.items():
        found = [name.rpartition(".")[2] for name in names if part in name.split(".")]
        assert found == [*inside] * len(model.blocks)


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_models_know_where_their_blocks_are(folder: str) -> None:
    found = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        if file.name == "version1.py":  # its blocks are those of bytes
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if text == "blocks" or text.startswith("blocks."):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not found
