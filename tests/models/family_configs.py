"""Tiny configs of transformers' families, as a user would write their config.json. Imports no torch."""

from typing import Any

Settings = dict[str, Any]

ENDS: Settings = {"bos_token_id": 1, "eos_token_id": 2}
SPECIAL: Settings = ENDS | {"pad_token_id": 0}
WIDTHS: Settings = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
DENSE: Settings = WIDTHS | SPECIAL | {"intermediate_size": 128, "max_position_embeddings": 128}
"""The keys that most decoders of the last years share."""
GROUPED: Settings = DENSE | {"num_key_value_heads": 2}
HEADS: Settings = GROUPED | {"head_dim": 16}
WINDOW: Settings = {"sliding_window": 8}
GPT: Settings = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128} | ENDS
T5: Settings = {
    **{"is_encoder_decoder": True, "vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4},
    **{"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
}
GATED: Settings = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART: Settings = {
    **{"is_encoder_decoder": True, "vocab_size": 512, "d_model": 64, "max_position_embeddings": 128},
    **{f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in
       {"layers": 2, "attention_heads": 4, "ffn_dim": 128}.items()},
    **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
}  # fmt: skip


def _of(family: str, settings: Settings, **more: Any) -> Settings:
    return {"model_type": family, **settings, **more}


SUPPORTED: dict[str, Settings] = {
    "GPT-2": _of("gpt2", GPT),
    "GPT-Neo": _of(
        "gpt_neo",
        {**DENSE, "num_layers": 2, "num_heads": 4, "window_size": 8, "attention_types": [[["global", "local"], 1]]},
    ),
    "GPT-J": _of("gptj", GPT, rotary_dim=8),
    "GPT-NeoX (Pythia)": _of("gpt_neox", DENSE),
    "OPT": _of("opt", DENSE, ffn_dim=128, word_embed_proj_dim=64),
    "BLOOM": _of("bloom", SPECIAL, vocab_size=512, hidden_size=64, n_layer=2, n_head=4),
    "Falcon": _of("falcon", DENSE),
    "Phi-2": _of("phi", DENSE),
    "Phi-3": _of("phi3", GROUPED),
    "Gemma": _of("gemma", HEADS),
    "Gemma 2": _of("gemma2", HEADS | WINDOW),
    "Gemma 3": _of("gemma3_text", HEADS | WINDOW),
    "Mistral": _of("mistral", HEADS),
    "Mistral, sliding window": _of("mistral", HEADS | WINDOW),
    "Qwen2": _of("qwen2", GROUPED),
    "Qwen3": _of("qwen3", HEADS),
    "OLMo 2": _of("olmo2", GROUPED),
    "StableLM": _of("stablelm", GROUPED),
    "StarCoder": _of("gpt_bigcode", GPT),
    "StarCoder2": _of("starcoder2", GROUPED),
    "Granite": _of("granite", GROUPED),
    "Cohere": _of("cohere", GROUPED),
    "GLM-4": _of("glm", HEADS),
    "Nemotron": _of("nemotron", HEADS),
    "Llama": _of("llama", HEADS, architectures=["LlamaForCausalLM"]),
    "Llama with attention biases": _of("llama", HEADS, attention_bias=True, architectures=["LlamaForCausalLM"]),
    "Qwen3 MoE": _of("qwen3_moe", HEADS, num_experts=8, moe_intermediate_size=64),
    "Mixtral": _of("mixtral", HEADS, num_local_experts=4),
    "OLMoE": _of("olmoe", GROUPED, num_experts=8, num_experts_per_tok=2),
    "GPT-OSS": _of("gpt_oss", HEADS, num_local_experts=4),
    "T5": _of("t5", T5),
    "T5 v1.1 (Flan-T5)": _of("t5", T5 | GATED),
    "mT5": _of("mt5", T5 | GATED),
    "UMT5": _of("umt5", T5 | GATED),
    "BART": _of("bart", BART),
    "mBART": _of("mbart", BART),
    "M2M-100 (NLLB)": _of("m2m_100", BART),
}
"""Families that train, by the name of a model that people know."""
REFUSED: dict[str, Settings] = {
    "Switch Transformers": _of("switch_transformers", T5, num_experts=4),
    "Mamba": _of("mamba", SPECIAL, vocab_size=512, hidden_size=64, num_hidden_layers=2),
    "RecurrentGemma": _of("recurrent_gemma", HEADS),
    "Pegasus": _of("pegasus", BART),
    "BioGPT": _of("biogpt", DENSE),
    "BERT": _of("bert", DENSE),
    "ALBERT": _of("albert", DENSE, embedding_size=32),
    "remote code": _of("gpt2", GPT, auto_map={"AutoModelForCausalLM": "modeling.Model"}),
    "an unknown model_type": _of("my_own_model", DENSE),
}
"""Families that break what the order needs to know, and are refused before training."""
FAMILIES = SUPPORTED | REFUSED
