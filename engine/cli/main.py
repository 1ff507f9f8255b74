"""The command `ruvon`, with all its subcommands. Part 20's wiring."""

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated

import typer

from engine.cli.bench import bench
from engine.cli.clients import chat, top, ui
from engine.cli.doctor import doctor
from engine.cli.engine_flags import takes_engine_args
from engine.cli.extensions import modules_of_extensions
from engine.cli.generate import generate
from engine.cli.models import models
from engine.cli.options import Command, refusals, with_dashes
from engine.cli.replay import replay
from engine.cli.serve import serve
from engine.cli.tokenize import tokenize
from engine.cli.trace import trace
from engine.demo.server import ROOT, environment
from engine.wiring.engine_args import EngineArgs

SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")  # installed by the extra `server`
INSTALL_SERVER = "pip install 'ruvon[server]'"
# Headings in the help.
RUN_TOPIC = "Run a model"
CLIENT_TOPIC = "Talk to a server, and watch it"
INSPECT_TOPIC = "Look inside"

# Settings of a command that takes any arguments, also --help.
ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    no_args_is_help=True,
    help="An LLM inference engine, in twenty parts. Begin with [bold]ruvon demo[/].",
    epilog="Each command says more with --help. In Python: from engine import LLM, SamplingParams",
    rich_markup_mode="rich",
    context_settings={"token_normalize_func": with_dashes},
)


def _print_version(is_requested: bool) -> None:
    """Print the version and end the command, if --version was given."""
    if is_requested:
        try:
            print(f"ruvon {version('ruvon')}")
        except PackageNotFoundError:
            print("ruvon, from a folder: it is not installed")
        raise typer.Exit


@app.callback()
def ruvon(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options of all commands."""


@app.command(rich_help_panel=RUN_TOPIC)
@takes_engine_args()
def demo(
    args: EngineArgs,
    seconds: Annotated[float, typer.Option(help="How long people ask.", min=0, max=600)] = 10,
    story: Annotated[
        bool, typer.Option("--story", help="One story in this process instead: tokens, ids, how fast.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of that story.")] = 220,
) -> None:
    """The main job: start a server, let several people stream at once, show its numbers, end."""
    missing = [name for name in SERVER_PACKAGES if find_spec(name) is None]
    if missing and not story:
        print(f"ruvon demo: one story only: {missing[0]} is not installed; {INSTALL_SERVER}", file=sys.stderr)
    if story or missing:
        from engine.demo.story import tell_story
        from engine.wiring.loading import one_thread_if_small

        with refusals("demo"):
            one_thread_if_small(args.model, args.model_impl)
            if args.max_num_seqs is None:
                args = replace(args, max_num_seqs=1)
            tell_story(args, max_tokens)
        return
    from engine.demo.show import show_crowd

    with refusals("demo", RuntimeError):
        show_crowd(args, seconds)


for command, example in (
    (generate, 'ruvon generate "Once upon a time" --temperature 0.8 --seed 1'),
    (serve, "ruvon serve storyteller; then, in another terminal: ruvon chat"),
):
    app.command(cls=Command, rich_help_panel=RUN_TOPIC, epilog=f"For example: {example}")(command)
app.add_typer(bench, name="bench", rich_help_panel=RUN_TOPIC)
for command in (chat, ui, top):
    app.command(rich_help_panel=CLIENT_TOPIC)(command)
for command in (tokenize, models, doctor, replay, trace):
    app.command(rich_help_panel=INSPECT_TOPIC)(command)


def add_commands_of_extensions(app: typer.Typer) -> None:
    """Add the commands of the lettered extensions that are in this tree."""
    for module in modules_of_extensions():
        for command in module.COMMANDS:
            app.command(cls=Command, rich_help_panel=RUN_TOPIC)(command)


add_commands_of_extensions(app)


@app.command("run", hidden=True, context_settings=ANY_ARGUMENTS)
def no_run() -> None:
    """Name the commands that replace `run`, which users know from Ollama. Ends with exit status 2."""
    print(
        "ruvon run: no such command; ruvon generate continues a text, ruvon serve and ruvon chat talk",
        file=sys.stderr,
    )
    sys.exit(2)


@app.command(rich_help_panel=INSPECT_TOPIC, context_settings=ANY_ARGUMENTS)
def parts(context: typer.Context) -> None:
    """The series: list, show, run, test, start, history (needs a checkout of the repository)."""
    if not (ROOT / "parts" / "__main__.py").exists():
        print(
            "ruvon parts: the parts (articles, notebooks, demos, tests) are not in the installed package. "
            "Clone the repository, run `pip install -e .` in it, and call this there.",
            file=sys.stderr,
        )
        sys.exit(2)
    tool = [sys.executable, "-m", "parts", *context.args]
    sys.exit(subprocess.run(tool, env=environment()).returncode)


if __name__ == "__main__":
    app()
