"""`ruvon demo --story`: shows tokens, a story and its speed, all in this process. Part 20's wiring."""

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from engine.client.untrusted import for_stdout
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import SamplingParams
from engine.demo.tokens import coloured
from engine.wiring.engine_args import EngineArgs
from engine.wiring.llm import LLM
from engine.wiring.loading import loading

PROMPT = "Once upon a time, there was a little dog named Max. Max had a red ball"


def tell_story(args: EngineArgs, max_tokens: int) -> None:
    """Load the model, show PROMPT's tokens, stream a story of at most `max_tokens` tokens, and print its
    speed. Raises CheckpointError or ValueError if the model, an option or `max_tokens` is refused.
    """
    console = Console()
    console.print(
        Panel.fit("[bold]ruvon[/]: a transformer tells a story, on this machine, through our own engine")
    )
    with loading(args.model):
        llm = LLM(**vars(args))
    _show_model(console, args, llm)
    prompt_ids = llm.tokenizer.encode(PROMPT)
    console.print("[bold]2. Tokens[/]  The model does not read letters. This is your prompt as it sees it:\n")
    console.print(coloured(llm.tokenizer, prompt_ids))
    output = _stream_story(console, llm, max_tokens)
    _show_speed(console, output, len(prompt_ids), max_tokens)
    console.print("\nNext: [cyan]python -m parts list[/] shows how this is built, part by part.")


def _show_model(console: Console, args: EngineArgs, llm: LLM) -> None:
    """Print the model's sizes, and how long it took to load."""
    config = llm.config
    console.print(
        f"[bold]1. Model[/]   {args.model}: {config.model_type}, {config.num_layers} layers, "
        f"{config.hidden_size} wide, {config.vocab_size:,} tokens in its vocabulary, "
        f"loaded in {llm.load_seconds:.2f} s\n"
    )


def _stream_story(console: Console, llm: LLM, max_tokens: int) -> RequestOutput:
    """Print the prompt and the story as it comes. Returns the last output, which has the whole story."""
    console.print(
        "\n[bold]3. Story[/]   One token at a time, each the likeliest after all before it (greedy):\n"
    )
    console.print(PROMPT, style="bold", end="", highlight=False)
    num_printed = 0  # characters
    output: RequestOutput | None = None
    for output in llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens)):
        text = output.outputs[0].text
        # Console.print takes longer for a token than the model does.
        print(for_stdout(text[num_printed:]), end="", flush=True)
        num_printed = len(text)
    assert output is not None  # a stream has at least one output, the last one
    return output


def _show_speed(console: Console, output: RequestOutput, num_prompt_tokens: int, max_tokens: int) -> None:
    """Print the story's length, why it ended, and how fast it came."""
    stats = output.stats
    assert stats is not None  # every output of an engine has them
    story = output.outputs[0]
    if story.finish_reason == "stop":
        reason = "the model ended the story"
    elif len(story.token_ids) == max_tokens:
        reason = "it reached --max-tokens"
    else:
        reason = "the context is full"
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("prompt", f"{num_prompt_tokens} tokens")
    table.add_row("output", f"{len(stats.token_times)} tokens ({reason})")
    table.add_row("time to first token", f"{stats.time_to_first_token * 1e3:.1f} ms")
    table.add_row("time per output token", f"{stats.time_per_output_token * 1e3:.2f} ms")
    table.add_row("speed", f"{stats.tokens_per_second:,.0f} tokens/s")
    console.print("\n\n[bold]4. Speed[/]")
    console.print(table)
