"""Qwen3, Mistral, OLMo 2 and 3 and Gemma 3 on our decoder, against transformers' own: as test_parity.py has it."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from models.cache import KeyValueCache
from models.config import TextFacts
from models.decoder import Decoder
from models.documents import Documents
from models.hf import config_to_hf, hf_name, parameter_shapes
from models.hf_families import FAMILIES
from models.hf_reading import Unsupported, config_from_hf
from parallel.errors import UserError
from recipes.recipe.load import load
from tests.training import DEBUG

LENGTH = 96  # beyond every window, and beyond the original length of YaRN
END = 0
SHARED: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 5e5}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
IRREGULAR = ["full_attention", *["sliding_attention"] * 2, "full_attention", "sliding_attention"]
# Name -> model_type, keys of its config.json, and the model_type that it is exported as.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen3": ("qwen3", {"tie_word_embeddings": True}, "qwen3"),
    "Qwen3, YaRN": ("qwen3", {"rope_parameters": {**YARN, "beta_fast": 16.0, "attention_factor": 1.3}}, "qwen3"),
    "Qwen3, windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention"] * 5},
        "qwen3",
    ),
    "Qwen3, some windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": IRREGULAR},
        "qwen3",
    ),
    "Mistral": ("mistral", {"sliding_window": 9}, "mistral"),
    "Mistral without a window": ("mistral", {"sliding_window": None}, "llama"),
    "OLMo 2": ("olmo2", {"head_dim": 16}, "olmo2"),
    "OLMo 3": (
        "olmo3",
        {"sliding_window": 9, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
        "olmo3",
    ),
    "OLMo 3, irregular": (
        "olmo3",
        {"sliding_window": 9, "layer_types": IRREGULAR}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
        "olmo3",
    ),
    "OLMo 3, as transformers 4 wrote it": (
        "olmo3",
        {"sliding_window": 9, "rope_theta": 5e5, "rope_scaling": {**YARN, "attention_factor": 1.2}},
        "olmo3",
    ),
    "Gemma 3": (
        "gemma3_text",
        {"sliding_window": 9, "query_pre_attn_scalar": 40, "num_hidden_layers": 7, "final_logit_softcapping": 3.0}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
        "gemma3_text",
    ),
    "Gemma 3, as transformers 4 wrote it": (
        "gemma3_text",
        {"sliding_window": 5, "sliding_window_pattern": 2, "rope_local_base_freq": 500.0, "rope_theta": 3e4},
        "gemma3_text",
    ),
}


def settings_of(case: str) -> dict[str, Any]:
    """The config.json of a case."""
    family, keys, _ = CASES[case]
    return {**SHARED, **keys, "model_type": family, "architectures": [FAMILIES[family].head]}


@cache
def reference(case: str) -> Any:
    """transformers' model with random weights, norms included."""
    family = CASES[case][0]
    config = transformers.AutoConfig.for_model(**settings_of(case))
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[family].head)._from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def ours(case: str) -> Decoder:
    """Our decoder with the same weights."""
    model = Decoder(config_from_hf(settings_of(case)))
    weights = reference(case).state_dict()
    model.load_state_dict({name: weights[hf_name(name, norms=model.config.norms)] for name in model.state_dict()})
    return model


def tokens_of() -> Tensor:
    return torch.randint(1, SHARED["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_a_family_has_the_logits_and_gradients_of_transformers(case: str) -> None:
    model, theirs, tokens = ours(case), reference(case), tokens_of()
    targets = tokens.roll(-1, dims=1)
    expected = theirs(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)
    theirs.zero_grad()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    model(tokens, targets).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient = gradients.pop(hf_name(name, norms=model.config.norms))
        assert (parameter.grad - gradient).norm() < 1e-4 * gradient.norm(), name
    assert not gradients


@pytest.mark.parametrize("case", CASES)
def test_a_text_that_a_cache_reads_in_parts_has_the_logits_of_the_whole(case: str) -> None:
    model, tokens = ours(case), tokens_of()
    cache = KeyValueCache(model.config, batch=2, max_length=LENGTH, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in tokens.split([30, 1, 1, 17, 1, 46], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_have_the_logits_of_each_by_itself(case: str) -> None:
    model, tokens = ours(case), tokens_of()[:1]
    tokens[0, 39] = END
    with torch.no_grad():
        packed = model(tokens, documents=Documents.of(tokens, end_of_document=END))
        alone = [model(part) for part in tokens.split([40, LENGTH - 40], dim=1)]
        torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_config_goes_through_hugging_face_and_back(case: str) -> None:
    model = config_from_hf(settings_of(case))
    written = config_to_hf(model, TextFacts(256))
    assert written["model_type"] == CASES[case][2]
    assert config_from_hf(written) == model
    assert [shape for _, shape in parameter_shapes(model)] == [tuple(p.shape) for p in Decoder(model).parameters()]
    assert [name for name, _ in parameter_shapes(model)] == [name for name, _ in Decoder(model).named_parameters()]
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**written))
    names = {name.replace("model.", "", 1) for name in theirs.state_dict()}
    assert names >= {hf_name(name, norms=model.norms).replace("model.", "", 1) for name, _ in parameter_shapes(model)}


@pytest.mark.parametrize(
    ("case", "keys", "said"),
    [
        ("Qwen3", {"attention_bias": True}, "biases in the attention projections"),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 7}, "use_sliding_window = True"),
        ("Gemma 3", {"attn_logit_softcapping": 50.0}, "soft-capped attention"),
        (
            "OLMo 3, as transformers 4 wrote it",
            {"rope_theta": 1e4, "rope_scaling": None},
            "transformers 5 takes it for a part",
        ),
    ],
)
def test_what_our_decoder_lacks_stays_with_transformers_and_says_why(
    case: str, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(Unsupported, match=said):
        config_from_hf(settings_of(case) | keys)


@pytest.mark.parametrize("keys", [{"use_bidirectional_attention": True}, {"is_causal": False}])
def test_a_model_that_sees_later_tokens_is_not_left_to_transformers(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attention to later tokens") as error:
        config_from_hf(settings_of("Gemma 3") | keys)
    assert not isinstance(error.value, Unsupported)


@pytest.mark.parametrize("case", ["OLMo 3, as transformers 4 wrote it", "Gemma 3, as transformers 4 wrote it"])
def test_an_old_key_of_rope_scaling_is_refused_where_transformers_ignores_it(case: str) -> None:
    def theirs(keys: dict[str, Any]) -> str:
        config = transformers.AutoConfig.for_model(**deepcopy(settings_of(case) | keys))
        return str(config.rope_parameters["full_attention"]["rope_type"])

    old = {"type": "linear", "factor": 8.0}
    ignored, read = {"rope_scaling": old}, {"full_attention": {**old, "rope_theta": 5e5}, "sliding_attention": PLAIN}
    assert theirs(ignored) == "default"
    with pytest.raises(Unsupported, match=r"^rope_scaling\.type = 'linear': .* ignores this key .*; write rope_type$"):
        config_from_hf(settings_of(case) | ignored)
    new = {"rope_scaling": {**old, "rope_type": "linear"}}
    for keys in (new, {"rope_parameters": read, "rope_scaling": None}, {"rope_parameters": read, "rope_scaling": old}):
        assert config_from_hf(settings_of(case) | keys).rope_scaling == theirs(keys) == "linear"
    plain = {"rope_scaling": {"type": "default"}}
    assert config_from_hf(settings_of(case) | plain).rope_scaling == "none" and theirs(plain) == "default"


@pytest.mark.parametrize(("field", "value"), [("window", 8), ("qk_norm", "all"), ("norms", "both")])
def test_a_mixture_of_families_cannot_be_exported(field: str, value: Any) -> None:
    model = replace(config_from_hf(settings_of("OLMo 2")), norms="before", qk_norm="none", logit_softcap=2.0)
    with pytest.raises(ValueError, match="logit_softcap"):
        config_to_hf(replace(model, **{field: value}), TextFacts(256))


def test_windows_refuse_cudnn_which_has_none() -> None:
    with pytest.raises(UserError, match=r'(?s)attention\.backend.*"cudnn" has no kernel for model\.window = 64'):
        load(DEBUG, ["--model.name=gemma3_debug", "--attention.backend=cudnn"])
