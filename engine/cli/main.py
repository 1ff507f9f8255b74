"""The command `ruvon`: which commands there are. Each has a file of its own. Part 20's wiring."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated

import typer

from engine.cli.chat import chat, ui
from engine.cli.generate import generate
from engine.cli.options import refusals, takes_engine_args
from engine.cli.serve import serve
from engine.cli.top import top
from engine.engine_args import EngineArgs

SERVER = ("fastapi", "uvicorn", "prometheus_client")  # what the extra `server` brings
INSTALL = "pip install 'ruvon[server]'"

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="An LLM inference engine, in twenty parts."
)
for command in (generate, serve, chat, ui, top):
    app.command()(command)


@app.command()
@takes_engine_args()
def demo(
    args: EngineArgs,
    seconds: Annotated[float, typer.Option(help="For which people ask.", min=0, max=600)] = 10,
    story: Annotated[
        bool, typer.Option("--story", help="One story in this process instead: tokens, ids, how fast.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Of that story, at most.")] = 220,
) -> None:
    """The main job: start a server, let several people stream at once, show its numbers, end."""
    missing = [name for name in SERVER if find_spec(name) is None]
    if missing and not story:
        print(f"ruvon demo: one story only: {missing[0]} is not installed; {INSTALL}", file=sys.stderr)
    if story or missing:
        from engine.cli.story import run as tell
        from engine.cli.threads import one_thread_if_small

        with refusals("demo"):
            one_thread_if_small(args.model)
            tell(args if args.max_num_seqs else replace(args, max_num_seqs=1), max_tokens)
        return
    from engine.cli.demo import run as show

    with refusals("demo", RuntimeError):
        show(args, seconds)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def parts(context: typer.Context) -> None:
    """The series: list, show, run, test, start, history (needs a checkout of the repository)."""
    from engine.cli.series import run

    sys.exit(run(context.args))


if __name__ == "__main__":
    app()
