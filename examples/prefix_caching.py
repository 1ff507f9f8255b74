"""Prompts that begin alike are computed once. In vLLM: another import, and another model."""

from engine import LLM, SamplingParams

prefix = (
    "Once upon a time, there was a little girl named Lily. She lived in a small house near a big forest with "
    "her mom, her dad and her brown dog Max. Every morning, Lily and Max went out to play in the sun. One "
    "day, they found a map under a big tree. The map showed the way to a secret garden. "
)
prompts = [
    "Lily said",
    "Max ran to",
    "Her mom was",
    "In the garden,",
]
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0)


def main():
    regular_llm = LLM(model="storyteller", enable_prefix_caching=False, gpu_memory_utilization=0.4)
    outputs = regular_llm.generate(generating_prompts, sampling_params)
    regular_texts = [output.outputs[0].text for output in outputs]
    del regular_llm

    prefix_cached_llm = LLM(model="storyteller", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    # The first prompt fills the cache; those that follow find the prefix there.
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
    for prompt, output in zip(prompts, outputs):
        print(f"… {prompt}{output.outputs[0].text} ({output.num_cached_tokens} prompt tokens were there)")
    same = regular_texts == [output.outputs[0].text for output in outputs]
    print(f"The texts are the same with and without the cache: {same}")


if __name__ == "__main__":
    main()
