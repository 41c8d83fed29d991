"""Models of transformers as ours: their parts, their initial values, and which are refused."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel, GPT2PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from models.documents import Documents
from models.initial_values import drawn_by_units
from models.interface import blocks_of, interface_of
from models.loss import cross_entropy_sum
from models.transformers import (
    TransformersModel,
    plain_model,
    require_causal,
    require_kernels,
    stored_layout,
)
from models.transformers_config import TransformersConfig
from parallel.fsdp import materialize
from tests.families import FAMILIES, LENGTH, batch_for, family_config
from tests.recipes.training.test_host_syncs import no_waiting

CPU = torch.device("cpu")


def on_meta(config: TransformersConfig, **options: Any) -> TransformersModel:
    with torch.device("meta"):
        return TransformersModel(config, **options)


def built(config: TransformersConfig, *, seed: int = 0) -> TransformersModel:
    model = on_meta(config)
    materialize(model, device=CPU, seed=seed)
    return model


def refusal(name: str, *, dropout: bool = False, **changes: Any) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        on_meta(family_config(name, dropout=dropout, **changes))
    return str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_name_of_the_interface_leads_to_its_module(name: str) -> None:
    model = on_meta(family_config(name))
    interface = interface_of(model)
    stacks = [len(stack) for stack in interface.stacks]
    assert stacks == ([2, 2] if family_config(name).is_encoder_decoder else [2])
    assert len({type(block) for block in blocks_of(model)}) == 1
    assert model.get_submodule(interface.embedding) is model.model.get_input_embeddings()
    assert model.get_submodule(interface.head or interface.tied_head) is model.model.get_output_embeddings()
    tied = model.model.get_output_embeddings().weight is model.model.get_input_embeddings().weight
    assert tied == (interface.head is None) == (interface.tied_head is not None)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str) -> None:
    config = family_config(name)
    ours, theirs = built(config), plain_model(config)
    layout = stored_layout(config).tensors
    with torch.no_grad():
        for full, parameter in ours.named_parameters():
            stored = layout[full]
            theirs.get_parameter(stored.name).copy_(parameter.t() if stored.transposed else parameter)
    inputs, _ = batch_for(config, 0)
    given: dict[str, Any] = {"input_ids": inputs}
    if config.is_encoder_decoder:
        given = {"input_ids": inputs.encoder_tokens, "attention_mask": inputs.encoder_mask.long()}
        given["decoder_input_ids"] = inputs.decoder_tokens
    torch.testing.assert_close(ours(inputs), theirs(**given).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_initial_values_have_the_distribution_of_transformers(name: str) -> None:
    config = family_config(name)
    ours, theirs = built(config), plain_model(config)
    layout = stored_layout(config).tensors
    for full, parameter in ours.named_parameters():
        same = theirs.get_parameter(layout[full].name)
        (mean, spread), (their_mean, their_spread) = (
            (values.mean().item(), values.std().item()) for values in (parameter.detach(), same.detach())
        )
        chance = 6 / parameter.numel() ** 0.5  # six standard deviations of the difference, about
        assert mean == pytest.approx(their_mean, abs=chance * their_spread + 1e-6), full
        assert spread == pytest.approx(their_spread, rel=chance), full
    theirs_buffers = dict(theirs.named_buffers())
    for full, buffer in ours.named_buffers():
        assert torch.equal(buffer, theirs_buffers[full.removeprefix("model.")])


def test_initial_values_depend_on_the_seed() -> None:
    one, again, other = (built(family_config("gpt2"), seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["model.transformer.wpe.weight"], other["model.transformer.wpe.weight"])


def test_tensors_without_initial_values_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT2PreTrainedModel, "_init_weights", lambda *_: None)
    with pytest.raises(ValueError, match=r"gives model.transformer.\S+ no initial values"):
        built(family_config("gpt2"))


def test_units_that_change_others_are_an_error() -> None:
    model = on_meta(family_config("gpt2"))
    with torch.device("meta"):
        twin = plain_model(family_config("gpt2"))
    plain = twin._init_weights

    def reaches_into_blocks(module: nn.Module) -> None:
        plain(module)
        if module is twin:
            twin.transformer.h[1].mlp.c_proj.weight.normal_()

    twin._init_weights = reaches_into_blocks
    with pytest.raises(ValueError, match="reach into other blocks"), torch.no_grad():
        list(drawn_by_units(twin, model.interface, seed=0, device=CPU))


def test_moving_a_model_keeps_shared_weights_shared() -> None:
    model = on_meta(family_config("t5")).to_empty(device="cpu").to(torch.bfloat16)
    names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    assert len({id(model.model.get_submodule(name).weight) for name in names}) == 1


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2", "mistral"])
def test_documents_do_not_see_each_other(name: str) -> None:
    config = family_config(name)
    require_causal(config, documents=True)
    model, end = built(config), 2
    tokens, _ = batch_for(config, 0)
    tokens[:, [6, 15]] = end
    packed = model(tokens, documents=Documents.of(tokens, end_of_document=end))
    for first, last in ((0, 7), (7, 16), (16, LENGTH)):
        torch.testing.assert_close(packed[:, first:last], model(tokens[:, first:last]), rtol=1e-4, atol=1e-5)


def test_a_model_that_caps_its_logits_does_so_before_the_loss() -> None:
    config = family_config("gemma2", final_logit_softcapping=0.01)
    model, (inputs, targets) = built(config), batch_for(config, 0)
    logits = model(inputs)
    assert 0.005 < logits.abs().max() <= 0.01
    torch.testing.assert_close(model(inputs, targets), cross_entropy_sum(logits, targets))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_does_not_wait_for_a_gpu(name: str) -> None:
    config = family_config(name)
    model, (inputs, targets) = built(config), batch_for(config, 0)
    documents = [None] if config.is_encoder_decoder else [None, Documents.of(inputs, end_of_document=5)]
    with no_waiting():
        for one in documents:
            model(inputs, targets, documents=one).backward()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "opt", "word_embed_proj_dim": 64, "ffn_dim": 96},
        {"model_type": "bloom", "n_layer": 2, "n_head": 4},
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    ],
)
def test_families_whose_documents_would_meet_are_refused(changes: dict[str, Any]) -> None:
    config = family_config("mistral", tie_word_embeddings=True, **changes)
    require_causal(config)
    with pytest.raises(ValueError, match=r"lets documents .* see each other; write data.document_mask = false"):
        require_causal(config, documents=True)


NOT_CAUSAL: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"is_causal": False}),
    *[("mistral", {"model_type": kind, "is_causal": False}) for kind in ("llama", "smollm3", "olmo3", "phi3", "qwen3")],
    ("mistral", {"model_type": "gemma3_text", "use_bidirectional_attention": True}),
    ("mistral", {"model_type": "bert", "intermediate_size": 96, "num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("name", "changes"), NOT_CAUSAL)
def test_a_model_whose_tokens_see_later_ones_is_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lets tokens see later ones"):
        require_causal(family_config(name, tie_word_embeddings=True, **changes))


def test_an_encoder_becomes_a_language_model_as_its_refusal_says() -> None:
    name, changes = NOT_CAUSAL[-1]
    with pytest.raises(ValueError, match=r"correct its config.json \(is_causal, is_decoder, "):
        require_causal(family_config(name, **changes))
    require_causal(family_config(name, **changes, is_decoder=True))


def test_a_large_model_is_tried_within_seconds() -> None:
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 29568}
    before = time.process_time()
    require_causal(family_config("mistral", model_type="qwen2", vocab_size=152064, **sizes))
    assert time.process_time() - before < 20


def test_dropout_is_not_taken_for_later_tokens() -> None:
    require_causal(family_config("gpt2", dropout=True, resid_pdrop=0.5, attn_pdrop=0.5))


def test_one_layer_that_sees_later_tokens_is_seen_among_causal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Qwen3Attention.__init__

    def fifth_looks_ahead(self: Any, config: Any, layer_idx: int) -> None:
        plain(self, config, layer_idx)
        self.is_causal = layer_idx != 4

    monkeypatch.setattr(Qwen3Attention, "__init__", fifth_looks_ahead)
    require_causal(family_config("qwen3", num_hidden_layers=4))
    with pytest.raises(ValueError, match="lets tokens see later ones"):
        require_causal(family_config("qwen3", num_hidden_layers=6))


def test_an_encoder_has_no_packed_documents() -> None:
    with pytest.raises(ValueError, match="has an encoder"):
        require_causal(family_config("t5"), documents=True)


def test_attention_kernels_need_a_family_that_has_them() -> None:
    require_kernels(family_config("mistral"), backend="math")
    with pytest.raises(ValueError, match=r'Gemma2ForCausalLM .* write attention.backend = "auto"'):
        require_kernels(family_config("gemma2"), backend="math")


def test_a_mixture_of_experts_is_refused() -> None:
    text = refusal("mistral", model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert "MixtralForCausalLM is a mixture of experts" in text


def test_a_state_space_model_is_refused() -> None:
    assert "keeps a recurrent state" in refusal("mistral", model_type="mamba", state_size=4)


def test_a_family_without_names_of_blocks_is_refused() -> None:
    assert "does not name its repeated blocks" in refusal("mistral", model_type="biogpt", tie_word_embeddings=True)


def test_a_loss_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT2LMHeadModel, "_loss_function", print, raising=False)
    assert "GPT2LMHeadModel has a loss of its own, print" in refusal("gpt2")


def test_blocks_that_share_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"transformer.h.1.mlp.c_fc.weight": "transformer.h.0.mlp.c_fc.weight"}
    monkeypatch.setattr(GPT2LMHeadModel, "_tied_weights_keys", names)
    assert "uses transformer.h.0.mlp.c_fc.weight also as transformer.h.1.mlp.c_fc.weight" in refusal("gpt2")


def test_a_model_without_an_output_projection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT2LMHeadModel, "get_output_embeddings", lambda _: None)
    assert "GPT2LMHeadModel has no output projection" in refusal("gpt2")


def test_dropout_is_off_unless_asked_for() -> None:
    config = family_config("gpt2")  # whose config.json asks for 0.1, as the default of the family
    model = built(config).train()
    inputs, targets = batch_for(config, 0)
    assert not interface_of(model).draws_random and torch.equal(model(inputs, targets), model(inputs, targets))


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_dropout_is_what_config_json_asks_for(name: str) -> None:
    config = family_config(name, dropout=True)
    model = built(config).train()
    inputs, targets = batch_for(config, 0)
    assert interface_of(model).draws_random and not torch.equal(model(inputs, targets), model(inputs, targets))


def test_dropout_that_config_json_does_not_have_is_refused() -> None:
    assert "config.json asks for no dropout; write false" in refusal("mistral", dropout=True)


def test_dropout_that_no_key_turns_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.transformers._set_dropout_to_zero", lambda _: None)
    assert "has dropout in transformer.drop, transformer.h.0.attn" in refusal("gpt2")


def test_leaving_out_blocks_at_random_is_refused() -> None:
    changes = {"model_type": "bart", "decoder_layerdrop": 0.1, "encoder_layers": 2, "decoder_layers": 2}
    assert "decoder_layerdrop leaves out blocks" in refusal("t5", dropout=True, **changes)


def test_the_head_of_a_t5_is_its_own_where_its_weights_are() -> None:
    config = replace(family_config("t5_gated"), tied_embeddings=False)
    model = on_meta(config)
    assert interface_of(model).head == "model.lm_head"
    assert "model.lm_head.weight" in dict(model.named_parameters())


def test_conv1d_is_a_linear_whose_weight_is_stored_transposed() -> None:
    layout = stored_layout(family_config("gpt2")).tensors
    stored = layout["model.transformer.h.0.attn.c_attn.weight"]
    assert stored.transposed and stored.shape == (192, 64)
    assert not layout["model.transformer.wte.weight"].transposed


def test_code_of_a_models_authors_is_not_run() -> None:
    config = family_config("gpt2", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert type(on_meta(config).model).__module__ == "transformers.models.gpt2.modeling_gpt2"
