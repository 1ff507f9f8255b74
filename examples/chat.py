"""A conversation, ten at once, and a template of your own. In vLLM: other imports, and another model."""

from pathlib import Path

from engine import LLM, EngineArgs
from engine.utils.argparse_utils import FlexibleArgumentParser

conversation = [
    {"role": "user", "content": "Tell me a story about a dog and a red ball."},
    {"role": "assistant", "content": "Max was a dog. He had a red ball."},
    {"role": "user", "content": "Tell me a story about a cat and a tree."},
]


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="storyteller")
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    parser.add_argument("--chat-template-path", type=str)
    return parser


def print_outputs(outputs):
    for output in outputs:
        print(f"Prompt: {output.prompt!r}")
        print(f"Answer: {output.outputs[0].text!r}")
        print("-" * 60)


def main(args: dict):
    max_tokens = args.pop("max_tokens")
    temperature = args.pop("temperature")
    chat_template_path = args.pop("chat_template_path")

    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    if temperature is not None:
        sampling_params.temperature = temperature

    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print_outputs(outputs)

    # Several conversations share the steps.
    conversations = [conversation for _ in range(10)]
    outputs = llm.chat(conversations, sampling_params, use_tqdm=True)
    print_outputs(outputs)

    # The same, written down in another way: by a file with a Jinja template.
    if chat_template_path is not None:
        template = Path(chat_template_path).read_text()
        outputs = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=template)
        print_outputs(outputs)


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
