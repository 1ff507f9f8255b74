"""The embedded Llama: its files are what its card says, and it speaks as Hugging Face lets it speak."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import LLM, SamplingParams
from engine.models.checkpoint import ZOO
from engine.models.config import ModelConfig

NAME = "storyteller-llama"
TURNS = [{"role": "user", "content": "Tell me a story about a dog and a red ball"}]
MOST_BYTES = 16 * 2**20


def test_it_has_llamas_shape_and_storytellers_tokenizer():
    config = ModelConfig.from_pretrained(NAME)
    assert (config.model_type, config.num_heads, config.num_kv_heads) == ("llama", 4, 2)
    assert config.tie_word_embeddings, "the head is the embedding"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (ZOO / NAME / file).read_bytes() == (ZOO / "storyteller" / file).read_bytes()
    assert sum(file.stat().st_size for file in (ZOO / NAME).iterdir()) < MOST_BYTES


def test_a_chat_gets_hugging_faces_tokens():
    tokenizer = AutoTokenizer.from_pretrained(ZOO / NAME)
    theirs = AutoModelForCausalLM.from_pretrained(ZOO / NAME, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        TURNS, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    want = theirs.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    llm = LLM(NAME, device="cpu", dtype="float32", max_model_len=256)
    (output,) = llm.chat(TURNS, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    assert output.outputs[0].token_ids == want.tolist()
    assert {"dog", "ball"} <= set(output.outputs[0].text.replace(".", " ").replace(",", " ").split())
