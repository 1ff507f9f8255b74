"""One model, several voices, in one batch. In vLLM: another import, another model, adapters of your own."""

from pathlib import Path

from engine import LLM, LoRARequest, SamplingParams

adapters = Path(__file__).parents[1] / "adapters"
prompt = "Dear"
voices = [
    None,  # the model itself
    LoRARequest("poetry", 1, str(adapters / "poetry")),
    LoRARequest("business", 2, str(adapters / "business")),
]
sampling_params = SamplingParams(temperature=0.8, max_tokens=40, seed=1)


def main():
    llm = LLM(model="storyteller", enable_lora=True, max_loras=2, max_lora_rank=8)
    outputs = llm.generate([prompt] * len(voices), sampling_params, lora_request=voices)
    for voice, output in zip(voices, outputs):
        print(f"{voice.lora_name if voice else 'the model itself'}: {prompt}{output.outputs[0].text}")
        print("-" * 60)


if __name__ == "__main__":
    main()
