"""Folders of models of transformers: bit-exact in and out, onto any mesh, under every name, or one clear error."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel.config import MeshConfig
from parallel.dist import start, stop
from parallel.errors import UserError
from recipes.weights.convert import export_checkpoint, import_folder, load_weights
from recipes.weights.locate import find_weights
from tests.build import build_model
from tests.families import FAMILIES
from tests.processes import run_processes
from tests.recipes.weights.test_hf_folder import TOKENIZER, edit_config, tensors
from tests.whole import export_model

GPTJ = {
    "model_type": "gptj",
    "vocab_size": 96,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "rotary_dim": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT_NEO = {
    "model_type": "gpt_neo",
    "vocab_size": 96,
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "attention_types": [[["global", "local"], 1]],
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = FAMILIES["mistral"] | {"model_type": "llama", "attention_bias": True}
BART = {"model_type": "bart", "d_model": 32, "vocab_size": 96, "max_position_embeddings": 32, "pad_token_id": 0}
BART |= {f"{part}_{key}": size for part in ("encoder", "decoder") for key, size in (("layers", 1), ("ffn_dim", 48))}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "is_encoder_decoder": True}
NEOX = {"model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "vocab_size": 96}
NEOX |= {"num_attention_heads": 2}
# Name -> (config.json, element type, bytes in a file)
CASES: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    "gpt2": (FAMILIES["gpt2"], torch.float32, "1GB"),
    "gpt2 in files": (FAMILIES["gpt2"], torch.bfloat16, "20KB"),
    "t5": (FAMILIES["t5"], torch.float32, "30KB"),
    "t5 1.1": (FAMILIES["t5_gated"], torch.bfloat16, "1GB"),
    "qwen3": (FAMILIES["qwen3"], torch.bfloat16, "30KB"),
    "gemma2": (FAMILIES["gemma2"], torch.float32, "1GB"),
    "mistral": (FAMILIES["mistral"], torch.float16, "1GB"),
    "llama with biases": (LLAMA, torch.float32, "1GB"),
    "bart, with a buffer": (BART, torch.float32, "1GB"),
    "gpt-neox, renamed": (NEOX, torch.float32, "1GB"),
}


def write_reference(folder: Path, settings: dict[str, Any], dtype: torch.dtype, file_size: str) -> Any:
    """A folder as transformers writes it, with random values in every tensor, and its model."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**settings)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    if "scale_decoder_outputs" in settings or settings.get("tie_word_embeddings") is False:
        model.get_output_embeddings().weight = nn.Parameter(torch.randn(settings["vocab_size"], config.hidden_size))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.02 * torch.randn_like(tensor))
    model.to(dtype).save_pretrained(folder, max_shard_size=file_size)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return model


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    write_reference(tmp_path / "gpt2", FAMILIES["gpt2"], torch.float32, "1GB")
    return tmp_path / "gpt2"


def round_trip(folder: Path, path: Path) -> Path:
    import_folder(folder, path / "checkpoint")
    export_checkpoint(path / "checkpoint", path / "out")
    return path / "out"


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


# Our decoder computes the other two: test_hf_folder.py.
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("qwen3", "mistral")])
def test_import_and_export_keep_every_bit_and_every_key_of_config_json(case: str, tmp_path: Path) -> None:
    write_reference(tmp_path / "in", *CASES[case])
    out = round_trip(tmp_path / "in", tmp_path)
    assert tensors(out) == tensors(tmp_path / "in")
    assert json.loads((out / "config.json").read_text()) == json.loads((tmp_path / "in" / "config.json").read_text())
    kept = "generation_config.json"
    assert (out / kept).read_bytes() == (tmp_path / "in" / kept).read_bytes()
    assert find_weights(out).model == find_weights(tmp_path / "checkpoint").model == find_weights(tmp_path / "in").model


@pytest.mark.parametrize("case", ["gpt2", "t5", "qwen3", "bart, with a buffer"])
def test_transformers_reads_an_export_without_a_warning(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    written = write_reference(tmp_path / "in", *CASES[case])
    reference = type(written).from_pretrained(tmp_path / "in")  # anew: .to() has rounded the rotary frequencies
    out = round_trip(tmp_path / "in", tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        read, about = type(reference).from_pretrained(out, output_loading_info=True)
        transformers.AutoTokenizer.from_pretrained(out)
    assert not any(about.values()) and not caplog.records
    tokens = torch.arange(12)[None]
    given = {"decoder_input_ids": tokens} if reference.config.is_encoder_decoder else {}
    assert torch.equal(read(tokens, **given).logits, reference(tokens, **given).logits)


def test_names_without_the_prefix_and_computed_buffers_are_read_as_those_of_the_hub(gpt2: Path, tmp_path: Path) -> None:
    before = tensors(gpt2)

    def as_on_the_hub(found: dict[str, Tensor]) -> dict[str, Tensor]:
        masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril() for layer in range(2)}
        masks["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        return {name.removeprefix("transformer."): value for name, value in found.items()} | masks

    edit_tensors(gpt2, as_on_the_hub)
    assert tensors(round_trip(gpt2, tmp_path)) == before


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        (GPTJ, "transformer.h.0.attn."),
        (GPT_NEO, "transformer.h.1.attn.attention."),
        (NEOX, "gpt_neox.layers.0.attention."),
    ],
    ids=["gpt-j", "gpt-neo", "gpt-neox"],
)
def test_masks_in_old_files_are_ignored_as_transformers_does(
    settings: dict[str, Any], place: str, tmp_path: Path
) -> None:
    write_reference(tmp_path / "in", settings, torch.float32, "1GB")
    before = tensors(tmp_path / "in")
    mask = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()
    old = {f"{place}bias": mask, f"{place}masked_bias": torch.tensor(-1e9)}
    edit_tensors(tmp_path / "in", lambda found: found | old)
    assert tensors(round_trip(tmp_path / "in", tmp_path)) == before
    bias = {"transformer.h.0.attn.bias": torch.zeros(48)}  # not a mask
    edit_tensors(tmp_path / "in", lambda found: found | bias)
    with pytest.raises(UserError, match=r"the model has no place for transformer\.h\.0\.attn\.bias"):
        import_folder(tmp_path / "in", tmp_path / "again")


def test_equal_copies_of_a_tied_weight_are_read_once(gpt2: Path, tmp_path: Path) -> None:
    before = tensors(gpt2)
    edit_tensors(gpt2, lambda found: found | {"lm_head.weight": found["transformer.wte.weight"].clone()})
    assert tensors(round_trip(gpt2, tmp_path)) == before


def test_a_copy_is_taken_where_the_tied_weight_is_missing(gpt2: Path, tmp_path: Path) -> None:
    before = tensors(gpt2)
    edit_tensors(gpt2, lambda found: found | {"lm_head.weight": found.pop("transformer.wte.weight")})
    assert tensors(round_trip(gpt2, tmp_path)) == before


def test_a_t5_that_transformers_5_saved_untied_is_read_as_such(tmp_path: Path) -> None:
    write_reference(tmp_path / "in", *CASES["t5 1.1"])
    assert json.loads((tmp_path / "in" / "config.json").read_text())["tie_word_embeddings"] is True
    assert not find_weights(tmp_path / "in").model.tied_embeddings
    (tmp_path / "tied").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(tmp_path / "in" / file, tmp_path / "tied" / file)
    edit_tensors(tmp_path / "tied", without_head)
    assert find_weights(tmp_path / "tied").model.tied_embeddings


def without_head(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if name != "lm_head.weight"}


def shard_and_load(folder: Path) -> None:
    """Load the folders of ON_TWO onto 2 processes, each its own part, and write them again."""
    world = start("cpu", seed=0)
    for number, (_, tensor) in enumerate(ON_TWO):
        weights = find_weights(folder / f"in-{number}")
        model, _ = build_model(weights.model, mesh=MeshConfig(tensor=tensor))
        load_weights(model, weights)
        export_model(model, folder / f"out-{number}", weights.description, world=world)
    stop()


ON_TWO = [("gpt2", 1), ("t5", 1), ("bart, with a buffer", 1), ("qwen3", 2)]
"""(case, mesh.tensor)"""


@pytest.mark.slow
def test_each_process_reads_its_part_and_all_write_the_same_folder_again(tmp_path: Path) -> None:
    for number, (case, _) in enumerate(ON_TWO):
        settings, _, file_size = CASES[case]
        write_reference(tmp_path / f"in-{number}", settings, torch.float32, file_size)
    run_processes(2, shard_and_load, tmp_path)
    for number, (case, _) in enumerate(ON_TWO):
        assert tensors(tmp_path / f"out-{number}") == tensors(tmp_path / f"in-{number}"), case


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (
        lambda folder: edit_tensors(folder, lambda found: {n: v for n, v in found.items() if "h.1.ln" not in n}),
        "missing: transformer.h.1.ln_1.weight, transformer.h.1.ln_1.bias",
    ),
    "unknown": (
        lambda folder: edit_tensors(folder, lambda found: found | {"transformer.h.2.ln": torch.ones(2)}),
        "no place for transformer.h.2.ln",
    ),
    "other shape": (
        lambda folder: edit_config(folder, n_inner=100),
        "h.0.mlp.c_fc.weight in model.safetensors has shape [64, 256], but the model needs [64, 100]",
    ),
    "different copies": (
        lambda folder: edit_tensors(folder, lambda found: found | {"lm_head.weight": torch.ones(96, 64)}),
        "says tie_word_embeddings, but its lm_head.weight differs from its transformer.wte.weight",
    ),
    "pickled": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin") and None,
        "GPT2LMHeadModel.from_pretrained",
    ),
    "slow tokenizer": (
        lambda folder: (folder / "tokenizer.json").rename(folder / "vocab.json") and None,
        "has no tokenizer.json; transformers can write one from its vocab.json: AutoTokenizer.from_pretrained",
    ),
    "experts": (lambda folder: edit_config(folder, num_experts=8), "mixtures of experts are not supported"),
    "quantized": (lambda folder: edit_config(folder, quantization_config={"bits": 4}), "quantized weights"),
    "custom code": (lambda folder: edit_config(folder, auto_map={"AutoModel": "x.Y"}), "custom code, which is never"),
    "another task": (
        lambda folder: edit_config(folder, architectures=["GPT2ForSequenceClassification"]),
        "only GPT2LMHeadModel, a causal language model, is supported",
    ),
    "class of no list": (lambda folder: edit_config(folder, architectures="GPT2LMHeadModel"), "architectures = 'GPT2"),
    "unknown family": (lambda folder: edit_config(folder, model_type="gpt9"), "has no such model"),
    "no family": (lambda folder: edit_config(folder, model_type=None), "model_type = None"),
    "malformed": (lambda folder: edit_config(folder, n_embd="wide"), "transformers refuses it"),
    "uneven heads": (lambda folder: edit_config(folder, n_head=5), "divisible"),
    "no words": (lambda folder: edit_config(folder, vocab_size=0), "vocab_size = 0: must be at least 1"),
    "far too wide": (lambda folder: edit_config(folder, vocab_size=10**9), "vocabulary is more than 16,777,216"),
    "far too large": (lambda folder: edit_config(folder, n_layer=10**9), "is more than 10,000"),
    "images": (lambda folder: edit_config(folder, model_type="llava"), "parts with configs of their own"),
    "masked": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "bert", "vocab_size": 96}') and None,
        "its tokens see later tokens, unless is_decoder = true",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_that_cannot_be_used_is_refused_and_nothing_is_left(case: str, gpt2: Path, tmp_path: Path) -> None:
    spoil, said = WRONG[case]
    spoil(gpt2)
    with pytest.raises(UserError) as error:
        import_folder(gpt2, tmp_path / "checkpoint")
    assert said in str(error.value)
    assert not (tmp_path / "checkpoint").exists()
