"""The command `ruvon`. Part 20's wiring."""

import sys
from typing import Annotated

import typer

from engine.checkpoint import CheckpointError, embedded_models

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="An LLM inference engine, in twenty parts."
)

ModelName = Annotated[
    str, typer.Option(help=f"Embedded ({', '.join(embedded_models())}), a folder, or a hub id.")
]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: ModelName = "storyteller",
    max_tokens: Annotated[int, typer.Option(help="At most this many tokens.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    load_format: Annotated[
        str, typer.Option(help="auto, safetensors, pt, or dummy (random weights).")
    ] = "auto",
) -> None:
    """Continue PROMPT: the text alone on stdout, as it is generated; everything else on stderr."""
    from engine.decoding.params import SamplingParams
    from engine.llm import LLM

    try:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        llm = LLM(model, device=device, dtype=dtype, load_format=load_format)
        count = 0
        for step in llm.stream(prompt, params):
            print(step.text, end="", flush=True)
            count += 1
    except (CheckpointError, ValueError) as error:
        sys.exit(f"ruvon: {error}")
    print(flush=True)
    print(f"{count} tokens, finish_reason {step.finish_reason}", file=sys.stderr)


@app.command()
def demo(model: ModelName = "storyteller", max_tokens: int = 220) -> None:
    """The main job: load a model, show tokens and ids, stream a story, show how fast."""
    from engine.cli.demo import run

    try:
        run(model, max_tokens)
    except (CheckpointError, ValueError) as error:
        sys.exit(f"ruvon: {error}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def parts(context: typer.Context) -> None:
    """The series: list, show, run, test, start, history (needs a checkout of the repository)."""
    from engine.cli.series import run

    sys.exit(run(context.args))


if __name__ == "__main__":
    app()
