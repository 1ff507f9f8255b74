"""The command `ruvon`. Part 20's wiring."""

import os
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
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
DType = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
LoadFormat = Annotated[str, typer.Option(help="auto, safetensors, pt, or dummy (random weights).")]


def _one_thread_if_small(model: str) -> None:
    """A small model's step is too short to share: its threads would mostly wait for one another."""
    import torch

    from engine.config import ModelConfig

    if ModelConfig.from_pretrained(model).hidden_size <= 512:
        torch.set_num_threads(1)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: ModelName = "storyteller",
    max_tokens: Annotated[int, typer.Option(help="At most this many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among this many tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Choose among the likeliest that reach this probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    device: Device = "cpu",
    dtype: DType = "auto",
    load_format: LoadFormat = "auto",
) -> None:
    """Continue PROMPT: the text alone on stdout, as it is generated; everything else on stderr."""
    from engine.decoding.params import SamplingParams
    from engine.llm import LLM

    try:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        _one_thread_if_small(model)
        llm = LLM(model, device=device, dtype=dtype, load_format=load_format, max_num_seqs=1)
        shown = 0
        for output in llm.stream(prompt, params):
            text = output.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
    except (CheckpointError, ValueError) as error:
        sys.exit(f"ruvon: {error}")
    print(flush=True)
    completion = output.outputs[0]
    print(f"{len(completion.token_ids)} tokens, finish_reason {completion.finish_reason}", file=sys.stderr)


@app.command()
def serve(
    model: ModelName = "storyteller",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="Clients must send it; default: RUVON_API_KEY, if set.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output, in tokens.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests running at once.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in one step.")] = 512,
    device: Device = "cpu",
    dtype: DType = "auto",
    load_format: LoadFormat = "auto",
) -> None:
    """Serve OpenAI's completions API over HTTP until Ctrl-C."""
    try:
        import uvicorn

        from engine.server.app import create_app
    except ModuleNotFoundError as error:
        sys.exit(f"ruvon serve: {error.name} is not installed; pip install 'ruvon[server]'")
    from engine.async_engine import AsyncLLMEngine
    from engine.llm import EngineArgs, build_engine

    try:
        _one_thread_if_small(model)
        args = EngineArgs(
            model=model,
            device=device,
            dtype=dtype,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        backend = AsyncLLMEngine(build_engine(args), name=model)
    except (CheckpointError, ValueError) as error:
        sys.exit(f"ruvon serve: {error}")
    key = api_key or os.environ.get("RUVON_API_KEY")
    uvicorn.run(create_app(backend, api_key=key), host=host, port=port)


@app.command()
def demo(model: ModelName = "storyteller", max_tokens: int = 220) -> None:
    """The main job: load a model, show tokens and ids, stream a story, show how fast."""
    from engine.cli.demo import run

    try:
        _one_thread_if_small(model)
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
