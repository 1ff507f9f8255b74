"""The command `ruvon`: which commands there are. Each has a file of its own. Part 20's wiring."""

import sys
from typing import Annotated

import typer

from engine.cli.chat import chat, ui
from engine.cli.generate import generate
from engine.cli.options import refusals, takes_engine_args
from engine.cli.serve import serve
from engine.cli.top import top
from engine.engine_args import EngineArgs

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="An LLM inference engine, in twenty parts."
)
for command in (generate, serve, chat, ui, top):
    app.command()(command)


@app.command()
@takes_engine_args(max_num_seqs=1)
def demo(
    args: EngineArgs, max_tokens: Annotated[int, typer.Option(help="At most this many tokens.")] = 220
) -> None:
    """The main job: load a model, show tokens and ids, stream a story, show how fast."""
    from engine.cli.demo import run
    from engine.cli.threads import one_thread_if_small

    with refusals("demo"):
        one_thread_if_small(args.model)
        run(args, max_tokens)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def parts(context: typer.Context) -> None:
    """The series: list, show, run, test, start, history (needs a checkout of the repository)."""
    from engine.cli.series import run

    sys.exit(run(context.args))


if __name__ == "__main__":
    app()
