"""Generation: the same tokens as transformers, the probabilities of sampling, and whole characters only."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from models.decoder import Decoder
from models.hf import hf_name
from models.hf_reading import config_from_hf
from models.sizes import SIZES
from parallel.errors import UserError
from parallel.fsdp import materialize
from recipes.data.text.tokenizer import END_OF_DOCUMENT, Tokenizer, build_tokenizer, load_tokenizer
from recipes.evaluation import generate as generate_module
from recipes.evaluation.generate import choose_device, continue_text, generate, open_model
from recipes.evaluation.opened import Sampling, next_token, odds, stream_text

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [[7], [1, 2, 3, 4, 5], list(range(50, 90)), [260] * 11]
NEW = 64
SHARED = {
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Large weights give logits that are far apart and texts that do not repeat.
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def their_model(family: str) -> Any:
    torch.manual_seed(0)
    if family == "smollm3":
        return SmolLM3ForCausalLM(SmolLM3Config(**SHARED, no_rope_layers=[1, 0, 0, 1], tie_word_embeddings=False))
    rope = {**SCALED, "original_max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**SHARED, head_dim=32, rope_parameters=rope))


def our_model(theirs: Any) -> Decoder:
    model = Decoder(config_from_hf(theirs.config.to_dict()))
    weights = dict(theirs.named_parameters())
    model.load_state_dict({name: weights[hf_name(name)].detach() for name in model.state_dict()})
    return model


def small_model() -> Decoder:
    """A model whose predictions are neither certain nor uniform."""
    model = Decoder(replace(SIZES["smollm3_debug"], width=32, feed_forward_width=48, vocabulary=64, init_std=0.2))
    materialize(model, device=CPU, seed=0)
    return model


# Against transformers


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [512, 8])
@pytest.mark.parametrize("family", ["smollm3", "llama"])
def test_greedy_tokens_equal_those_of_transformers(family: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_module, "PREFILL_TOKENS", chunk)
    theirs = their_model(family)
    ours = our_model(theirs)
    for prompt in PROMPTS:
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0].tolist()
        found = list(generate(ours, prompt, Sampling(NEW, temperature=0)))
        assert prompt + found == expected
        # The test is meaningful: no two logits are about equal, and the text does not repeat.
        with torch.no_grad():
            first, second = theirs(torch.tensor([expected])).logits[0, len(prompt) - 1 : -1].topk(2).values.T
        assert (first - second).min() > 5e-4
        assert len(found) == NEW and len(set(found)) > 20


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 5, 1.0), (1.0, 0, 0.5), (0.8, 20, 0.9), (1.0, 1, 0.01), (1.0, 500, 1e-6)],
)
def test_odds_equal_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(100)
    before = logits.clone()
    expected = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = odds(logits, Sampling(1, temperature, top_k, top_p))
    assert torch.equal(logits, before)
    torch.testing.assert_close(found, expected[0].softmax(dim=-1))
    assert ((found > 0) == (expected[0] > -torch.inf)).all()


# Sampling


def test_tokens_are_drawn_with_the_probabilities_of_odds() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    drawn = Counter(next_token(logits, Sampling(1, top_k=3), generator=generator) for _ in range(4000))
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    assert set(drawn) == {0, 1, 2}
    for token, chance in enumerate(expected.tolist()):
        assert drawn[token] / 4000 == pytest.approx(chance, abs=0.03)  # four standard deviations


def test_only_the_seed_decides_what_is_sampled() -> None:
    model = small_model()

    def sample(seed: int, **options: Any) -> list[int]:
        return list(generate(model, [3, 1, 4], Sampling(**{"max_tokens": 30, "seed": seed} | options)))

    assert sample(0) == sample(0) != sample(1)
    assert sample(0, max_tokens=7) == sample(0)[:7]
    assert sample(0, top_k=1) == sample(5, temperature=0.0)


def test_a_stop_token_ends_the_text_and_is_not_part_of_it() -> None:
    model = small_model()
    free = list(generate(model, [3], Sampling(30, seed=2)))
    stop = free[11]
    assert list(generate(model, [3], Sampling(30, seed=2), stop_ids={stop, 999})) == free[: free.index(stop)]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="the prompt has no tokens"):
        next(generate(small_model(), [], Sampling(1)))


def test_every_option_out_of_range_is_listed() -> None:
    with pytest.raises(UserError) as refused:
        Sampling(max_tokens=0, temperature=-1.0, top_k=-2, top_p=0.0, seed=-1).require_possible()
    assert str(refused.value).splitlines() == [
        "max_tokens = 0: must be 1 or more",
        "temperature = -1.0: must be 0 (greedy), or 0.001 or more",
        "top_k = -2: must be 1 or more, or 0 for all tokens",
        "top_p = 0.0: must be above 0 and at most 1",
        "seed = -1: must be 0 or more, and below 2^63",
    ]


def test_options_at_the_edge_of_their_range_are_accepted() -> None:
    Sampling(max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, seed=2**63 - 1).require_possible()


@pytest.mark.parametrize("device", ["meta", "xla"])
def test_an_unsupported_device_is_refused(device: str) -> None:
    with pytest.raises(UserError, match=r"device '.*': must be cpu, cuda or mps"):
        choose_device(device, None)


def test_segments_of_gpu_memory_grow_before_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(generate_module, "let_segments_grow", lambda: done.append("segments grow"))
    monkeypatch.setattr(torch, "empty", lambda size, device: done.append(str(device)))
    for device in ("cpu", "cuda:1"):
        choose_device(device, None)
    assert done == ["cpu", "segments grow", "cuda:1"]


@pytest.mark.slow
def test_a_checkpoint_of_ours_is_read_without_safetensors() -> None:
    code = "import sys; sys.modules['safetensors'] = None; import recipes.evaluation.generate, recipes.weights.convert"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_growing_the_cache_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    whole = list(generate(model, [3, 1], Sampling(40)))
    monkeypatch.setattr(generate_module, "FIRST_TOKENS", 3)
    assert list(generate(model, [3, 1], Sampling(40))) == whole
    assert next(generate(model, [3, 1], Sampling(10**12))) == whole[0]


def test_a_model_with_nan_weights_is_refused() -> None:
    model = small_model()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="after 2 tokens the logits are NaN or infinite"):
        next(generate(model, [1, 2], Sampling(1)))


# Text


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer with one token per byte, which gives as many incomplete characters as possible."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text("abc")
    options = {
        "sources": [str(folder / "text.txt")],
        "text_field": "text",
        "cache": folder,
        "log": lambda line: None,
    }
    return load_tokenizer("train:257", **options)


@pytest.fixture(scope="module")
def sentencepiece() -> LibraryTokenizer:
    """As in Llama 2: a space belongs to the next word, the first is dropped, rare characters are bytes."""
    entries = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "!"]
    tokenizer = LibraryTokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TEXT = "naïve 中文 \U0001f600\U0001f469\u200d\U0001f680 end" * 3


def test_no_piece_has_half_a_character(bytes_only: Tokenizer) -> None:
    ids = bytes_only.ids(TEXT)
    assert len(ids) == len(TEXT.encode())
    pieces = list(stream_text(ids, bytes_only.decode))
    assert pieces == list(TEXT)


def test_random_bytes_are_yielded_completely_and_in_many_pieces(bytes_only: Tokenizer) -> None:
    ids = torch.randint(1, 257, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    pieces = list(stream_text(ids, bytes_only.decode))
    assert "".join(pieces) == bytes_only.decode(ids)
    assert len(pieces) > 100


def test_an_incomplete_character_at_the_end_is_yielded(bytes_only: Tokenizer) -> None:
    cut = bytes_only.ids("a中")[:-1]
    assert list(stream_text(cut, bytes_only.decode)) == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_the_spaces_between_words_are_kept(sentencepiece: LibraryTokenizer) -> None:
    hello, world, mark = (sentencepiece.token_to_id(token) for token in ("▁Hello", "▁world", "!"))
    char = [sentencepiece.token_to_id(f"<0x{byte:02X}>") for byte in "中".encode()]

    def decode(ids: Any) -> str:
        return sentencepiece.decode(list(ids), skip_special_tokens=False)

    assert list(stream_text([hello, world], decode)) == ["Hello", " world"]
    assert list(stream_text([world, mark, *char, world], decode, after=[hello])) == [" world", "!", "中", " world"]
    many = [hello, world, mark, *char, mark] * 20
    assert "".join(stream_text(many, decode)) == decode(many)


# From a folder


def folder_of(theirs: Any, tokenizer: Tokenizer, folder: Path) -> Path:
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())
    return folder


def test_a_hugging_face_folder_continues_a_text(bytes_only: Tokenizer, tmp_path: Path) -> None:
    theirs = their_model("llama")
    opened = open_model(folder_of(theirs, bytes_only, tmp_path / "model"), dtype=torch.float32, device=CPU)
    said: list[str] = []
    tokens, seconds = continue_text(opened, "naïve ", Sampling(20, temperature=0.0), log=said.append)
    prompt = bytes_only.ids("naïve ")
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0].tolist()
    ids = [i for i in expected if i < 257]  # the model has a few more rows than the tokenizer has tokens
    assert said[0] == "naïve " and len(said) > 3
    assert "".join(said) == bytes_only.decode(ids)
    assert tokens == 20 and seconds > 0


def test_a_model_opened_in_bfloat16_computes_in_bfloat16(bytes_only: Tokenizer, tmp_path: Path) -> None:
    opened = open_model(
        folder_of(their_model("smollm3"), bytes_only, tmp_path / "model"), dtype=torch.bfloat16, device=CPU
    )
    assert {parameter.dtype for parameter in opened.model.parameters()} == {torch.bfloat16}
    assert len(list(generate(opened.model, [1, 2], Sampling(5, temperature=0)))) == 5


def test_an_empty_text_starts_after_the_end_of_a_document(bytes_only: Tokenizer, tmp_path: Path) -> None:
    opened = open_model(
        folder_of(their_model("llama"), bytes_only, tmp_path / "model"), dtype=torch.float32, device=CPU
    )
    assert opened.prompt_ids("") == [bytes_only.end_of_document]
    assert opened.stop_ids() == {bytes_only.end_of_document}


def test_only_a_model_trained_with_a_beginning_token_gets_one(bytes_only: Tokenizer, tmp_path: Path) -> None:
    """The tokenizers of Llama add it; for a model trained here with such a tokenizer they must not. In a folder of
    others, tokenizer.json says it where config.json does not, as for transformers and the lm-evaluation-harness."""
    from tokenizers.processors import TemplateProcessing

    from recipes.weights.convert import import_folder
    from recipes.weights.locate import find_weights

    bos = bytes_only.end_of_document
    library = LibraryTokenizer.from_str(bytes_only.backend.to_str())
    library.post_processor = TemplateProcessing(single=f"{END_OF_DOCUMENT} $A", special_tokens=[(END_OF_DOCUMENT, bos)])
    with_bos = build_tokenizer(library.to_str(), where=tmp_path)
    for token in (bos, None):
        theirs = their_model("llama")
        theirs.config.bos_token_id = token
        folder = folder_of(theirs, with_bos, tmp_path / str(token))
        import_folder(folder, tmp_path / f"imported {token}")
        for place in (folder, tmp_path / f"imported {token}"):
            opened = open_model(place, dtype=torch.float32, device=CPU)
            assert opened.prompt_ids("ab") == [bos, *bytes_only.ids("ab")]
    weights = find_weights(tmp_path / "imported None")
    trained = replace(weights, facts=replace(weights.facts, bos_token_id=None))
    opened = open_model(trained, dtype=torch.float32, device=CPU)
    assert opened.prompt_ids("ab") == bytes_only.ids("ab")


def test_a_tokenizer_of_another_model_is_refused(bytes_only: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**SHARED | {"vocab_size": 100}))
    with pytest.raises(UserError, match="ids up to 256, but the model's vocabulary is 100"):
        open_model(folder_of(theirs, bytes_only, tmp_path / "model"), dtype=torch.float32, device=CPU)
