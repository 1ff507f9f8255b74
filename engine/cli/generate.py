"""`ruvon generate`: continues one prompt with an engine in this process. Part 20's wiring."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.engine_flags import takes_engine_args
from engine.cli.options import flag, refusals
from engine.wiring.engine_args import ADAPTERS, EngineArgs

OUTPUT = "The text"  # a heading in the help


@takes_engine_args(max_num_seqs=1)
def generate(
    args: EngineArgs,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_tokens: Annotated[int, flag(OUTPUT, "At most this many tokens.")] = 256,
    temperature: Annotated[float, flag(OUTPUT, "0 is greedy.")] = 0.0,
    top_k: Annotated[int, flag(OUTPUT, "Choose among this many tokens; 0: all.")] = 0,
    top_p: Annotated[
        float,
        flag(OUTPUT, "Choose among the likeliest that reach this probability."),
    ] = 1.0,
    lora: Annotated[
        Path | None,
        flag(ADAPTERS, "The folder of a LoRA adapter to use."),
    ] = None,
) -> None:
    """Continue PROMPT: the text alone on stdout, as it is generated; everything else on stderr."""
    from engine.client.untrusted import for_stdout
    from engine.decoding.params import SamplingParams
    from engine.lora.request import LoRARequest
    from engine.models.config import OURS
    from engine.wiring.llm import LLM
    from engine.wiring.loading import describe_implementation, loading, one_thread_if_small

    with refusals("generate"):
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=args.seed
        )
        if lora is not None and not args.enable_lora:
            raise ValueError("--lora needs --enable-lora")
        adapter = LoRARequest("adapter", 1, lora) if lora is not None else None
        one_thread_if_small(args.model, args.model_impl)
        with loading(args.model):
            llm = LLM(**vars(args))
        num_printed = 0  # characters
        for output in llm.stream(prompt, params, lora_request=adapter):
            completion = output.outputs[0]
            print(for_stdout(completion.text[num_printed:]), end="", flush=True)
            num_printed = len(completion.text)
    print(flush=True)
    # `completion` is that of the last output, which is whole. Every stream has an output.
    print(f"{len(completion.token_ids)} tokens, finish_reason {completion.finish_reason}", file=sys.stderr)
    if llm.config.model_impl != OURS:
        print(f"model: {describe_implementation(llm.config)}", file=sys.stderr)
