"""Families of models that Hugging Face's code computes on our pages: equal, or refused by name.

    python -m tests.partC.families                  # the tables of the article
    python -m tests.partC.families Gemma FOLDER     # a tiny random model of that family in FOLDER

Settings are beside those of `tiny` (benchmarks/partC_models.py).
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.partC_models import tiny

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.5] * 8, "long_factor": [9.0] * 8,
    "original_max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 4, "first_k_dense_replace": 1,
}  # fmt: skip

# What the reader knows it as -> (model_type, settings beside those of `tiny`).
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama 3.1's rotary scaling": ("llama", {"rope_parameters": LLAMA3}),
    "Llama, YaRN": ("llama", {"rope_parameters": YARN}),
    "Qwen2, Qwen2.5": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"head_dim": 16}),
    "Qwen3-MoE": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "mlp_only_layers": [1], **EXPERTS}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral, sliding window": ("mistral", {"sliding_window": 8}),
    "Mixtral": ("mixtral", {"num_local_experts": 4}),
    "Gemma": ("gemma", {"head_dim": 16}),
    "Gemma 2": ("gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "Gemma 3, text": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 24, **MIXED}),
    "Phi-3": ("phi3", {}),
    "Phi-3, long": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "Phi": ("phi", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", MIXED),
    "SmolLM3": ("smollm3", {}),
    "GPT-NeoX, Pythia": ("gpt_neox", {}),
    "GPT-2": ("gpt2", {}),
    "OPT": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "OPT, projected embeddings": (
        "opt", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "Granite": (
        "granite",
        {
            "attention_multiplier": 0.1, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "StarCoder (one key head)": ("gpt_bigcode", {}),
    "StarCoder 2": ("starcoder2", {}),
    "gpt-oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, **MIXED}),
    "Cohere": ("cohere", {"logit_scale": 0.25}),
    "Cohere 2": ("cohere2", {"logit_scale": 0.25, **MIXED}),
    "StableLM": ("stablelm", {}),
    "GLM 4": ("glm4", {"head_dim": 16}),
    "Nemotron": ("nemotron", {"head_dim": 16}),
    "OLMoE": ("olmoe", {"num_experts": 4, **EXPERTS}),
    "Phi-3.5-MoE": ("phimoe", {"num_local_experts": 4}),
    "DeepSeek-V3": ("deepseek_v3", {"n_group": 2, "topk_group": 1, **LATENT, **EXPERTS}),
}  # fmt: skip
# What each does otherwise than Llama, which has RMSNorm before attention and MLP, keys and queries that are
# turned by position, and a SiLU gate.
CHANGES = {
    "Llama": "the measure of this column",
    "Llama 3.1's rotary scaling": "slow pairs turn slower still",
    "Llama, YaRN": "pairs turn slower by a ramp; scores are scaled",
    "Qwen2, Qwen2.5": "biases of queries, keys, values",
    "Qwen3": "a norm of each head's query and key",
    "Qwen3-MoE": "Qwen3's; experts",
    "Mistral": "nothing",
    "Mistral, sliding window": "a window in every layer",
    "Mixtral": "experts",
    "Gemma": "norms by 1 + weight, embeddings times √D, a GELU gate",
    "Gemma 2": "Gemma's; norms behind attention and MLP; a window in every second layer; a scale; caps",
    "Gemma 3, text": "Gemma's; norms as Gemma 2, and of queries and keys; windows in most layers; a scale",
    "Phi-3": "one matrix for q, k, v, one for gate and up",
    "Phi-3, long": "Phi-3's; pairs turn slower, each by a factor of its own",
    "Phi": "LayerNorm; attention and MLP side by side; a part of each head is turned; biases; no gate",
    "OLMo 2": "norms behind attention and MLP, and of all queries and keys",
    "OLMo 3": "OLMo 2's; windows in most layers",
    "SmolLM3": "no turn in every fourth layer",
    "GPT-NeoX, Pythia": "LayerNorm; attention and MLP side by side; a part of each head is turned; no gate",
    "GPT-2": "LayerNorm; positions are added, not turned; no gate",
    "OPT": "LayerNorm; positions are added, from 2 on; a ReLU MLP",
    "OPT, projected embeddings": "OPT's; embeddings narrower than D; norms behind",
    "Granite": "multipliers of embeddings, scores, residuals, logits",
    "StarCoder (one key head)": "GPT-2's; one key head for all query heads",
    "StarCoder 2": "LayerNorm; biases; no gate; a window if the file says so",
    "gpt-oss": "sinks; a window in every second layer; experts; biases",
    "Cohere": "one LayerNorm for attention and MLP side by side; logits are scaled",
    "Cohere 2": "Cohere's; a window, and a turn only where there is one",
    "StableLM": "LayerNorm; a part of each head is turned",
    "GLM 4": "norms behind attention and MLP, too; a part of each head is turned",
    "Nemotron": "LayerNorm by 1 + weight; a squared ReLU, no gate; a part of each head is turned",
    "OLMoE": "experts; norms of queries and keys",
    "Phi-3.5-MoE": "LayerNorm; experts; biases",
    "DeepSeek-V3": "keys and values from one narrow row; values shorter than keys; experts",
}
# Families of EQUAL that several ranks share (Extension A), by the library's own plan.
SHARED = (
    "Llama", "Llama 3.1's rotary scaling", "Llama, YaRN", "Qwen2, Qwen2.5", "Qwen3", "Mistral",
    "Mistral, sliding window", "Gemma", "Gemma 2", "Gemma 3, text", "Phi", "SmolLM3", "GPT-NeoX, Pythia",
    "Granite", "StarCoder 2", "Cohere", "Cohere 2", "Nemotron",
)  # fmt: skip
# Seeds of random weights with which the likeliest token is clear, where seed 0 has a near tie.
SEEDS = {
    "Llama 3.1's rotary scaling": 3, "Qwen3-MoE": 1, "GPT-NeoX, Pythia": 3, "Granite": 4, "StarCoder 2": 2,
    "gpt-oss": 2, "Cohere": 5, "Cohere 2": 1, "GLM 4": 1, "OLMoE": 1, "Phi-3.5-MoE": 1,
}  # fmt: skip
# What the reader knows it as -> (model_type, settings, words of the refusal).
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5 (an encoder beside the decoder)": ("t5", {}, "has an encoder beside its decoder"),
    "Whisper (speech)": ("whisper", {}, "has an encoder beside its decoder"),
    "BERT (an encoder)": ("bert", {}, "sees other positions than those before it or a window of them"),
    "CLIP (images)": ("clip", {}, "made of several models"),
    "Gemma 3 with images": ("gemma3", {}, "made of several models (text_config, vision_config)"),
    "Mamba (state-space)": ("mamba", {}, "keeps a state beside keys and values"),
    "Jamba (hybrid)": ("jamba", {}, "keeps a state beside keys and values"),
    "Qwen3-Next (linear attention)": ("qwen3_next", {}, "keeps a state beside keys and values"),
    "MiniMax (linear attention)": ("minimax", {}, "layer_types has 'linear_attention'"),
    "Llama 4, text (chunked attention)": ("llama4_text", {}, "layer_types has 'chunked_attention'"),
    "Gemma 3n, text (shared keys)": ("gemma3n_text", {}, "num_kv_shared_layers=15"),
    "BLOOM (ALiBi)": ("bloom", {}, "of 2 layers, these attend: []"),
    "MPT (ALiBi)": ("mpt", {}, "made of several models (attn_config)"),
    "Falcon (attention of its own)": ("falcon", {}, "its attention is chosen from a list of its own"),
    "GPT-J (attention of its own)": ("gptj", {}, "its attention is chosen from a list of its own"),
    "DiffLlama (attends twice)": ("diffllama", {}, "these attend: [0, 0, 1, 1]"),
    "a model that nobody knows": (
        "no_such_model",
        {},
        "does not know it",
    ),
}


def make(name: str, folder: Path, seed: int | None = None) -> Any:
    """A tiny random model of the family `name`, saved in `folder`. Returns Hugging Face's object of it."""
    model_type, settings = EQUAL[name]
    return tiny(model_type, folder, SEEDS.get(name, 0) if seed is None else seed, **settings)


def refused_config(name: str) -> dict[str, Any]:
    """The config.json of a family in REFUSED."""
    model_type, settings, _ = REFUSED[name]
    return {"model_type": model_type, "num_hidden_layers": 2} | settings


def table(equal: Mapping[str, Any] = EQUAL, refused: Mapping[str, Any] = REFUSED) -> str:
    """The families as two tables in Markdown."""
    rows = [f"| {name} | `{kind}` | {CHANGES[name]} |" for name, (kind, _) in equal.items()]
    no = [f"| {name} | `{kind}` | {words} |" for name, (kind, _, words) in refused.items()]
    lines = ["| equal to Hugging Face's | `model_type` | otherwise than Llama |", "|---|---|---|", *rows, ""]
    return "\n".join([*lines, "| refused | `model_type` | in these words |", "|---|---|---|", *no])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="?", choices=EQUAL, metavar="FAMILY", help="as in the table")
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="where its model is to be made"
    )
    options = parser.parse_args()
    if options.family and options.folder is None:
        parser.error("FOLDER is missing")
    if options.family:
        make(options.family, options.folder)
    else:
        print(table())


if __name__ == "__main__":
    main()
