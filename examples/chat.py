"""A conversation, ten at once, and a template of your own. In vLLM: another import, and another model."""

from engine import LLM

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
conversation = [
    {"role": "user", "content": "Tell me a story about a dog and a red ball."},
    {"role": "assistant", "content": "Max was a dog. He had a red ball."},
    {"role": "user", "content": "Tell me a story about a cat and a tree."},
]


def print_outputs(outputs):
    for output in outputs:
        print(f"Prompt: {output.prompt!r}")
        print(f"Answer: {output.outputs[0].text!r}")
        print("-" * 60)


def main():
    llm = LLM(model="storyteller")
    sampling_params = llm.get_default_sampling_params()

    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print_outputs(outputs)

    # Several conversations share the steps.
    conversations = [conversation for _ in range(10)]
    outputs = llm.chat(conversations, sampling_params, use_tqdm=True)
    print_outputs(outputs)

    # The same, written down in another way.
    outputs = llm.chat(conversation, sampling_params, chat_template=TEMPLATE, use_tqdm=False)
    print_outputs(outputs)


if __name__ == "__main__":
    main()
