"""Every option of the engine as a flag. In vLLM: other imports, and another model.

python examples/generate.py --max-tokens 40 --temperature 0 --max-model-len 256
"""

from engine import LLM, EngineArgs
from engine.utils.argparse_utils import FlexibleArgumentParser

prompts = ["Once upon a time", "One day, a little bird", "Lily found a shiny", "The sun was warm and"]


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="storyteller")
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)
    return parser


def main(args: dict):
    # What is left of args when these are taken out are the engine's options.
    wishes = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = LLM(**args)

    # The model's own recommendations, but for what was asked for.
    sampling_params = llm.get_default_sampling_params()
    for name, value in wishes.items():
        if value is not None:
            setattr(sampling_params, name, value)

    for output in llm.generate(prompts, sampling_params):
        print(f"Prompt: {output.prompt!r}")
        print(f"Output: {output.outputs[0].text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
