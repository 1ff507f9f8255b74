"""`ruvon replay`: runs the steps in a file of `--record` again and compares the tokens. Part 20's wiring."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engine.execution.recording import ComparedStep


def replay(
    file: Annotated[Path, typer.Argument(help="A file that --record wrote.")],
    model: Annotated[
        str | None, typer.Option(help="The model's name or folder here; default: as recorded.")
    ] = None,
) -> None:
    """Run every step of a recording again, and say where its tokens differ.

    Exit status 1: tokens differ. 2: the file cannot be run.
    """
    from engine.client.untrusted import one_printable_line, printable
    from engine.models.checkpoint import CheckpointError
    from engine.wiring.loading import one_thread_if_small
    from engine.wiring.replay import args_of
    from engine.wiring.replay import replay as run

    num_steps = num_tokens = 0
    first_difference: ComparedStep | None = None  # the first step whose tokens differ
    try:
        args = args_of(file)
        one_thread_if_small(model or args.model, args.model_impl)
        for compared in run(file, model):
            num_steps += 1
            num_tokens += sum(map(len, compared.tokens_now or ()))
            if compared.error:
                message = f"failed when it was recorded: {printable(compared.error)}"
                print(f"step {compared.number}: {message}", file=sys.stderr)
            if not compared.is_equal and first_difference is None:
                first_difference = compared
    except (CheckpointError, ValueError, OSError) as error:
        print(f"ruvon replay: {one_printable_line(error)}", file=sys.stderr)
        sys.exit(2)
    if first_difference is None:
        print(f"{num_steps:,} steps, {num_tokens:,} tokens: all as recorded")
        return
    _print_difference(first_difference, num_steps)
    raise typer.Exit(1)


def _print_difference(difference: "ComparedStep", num_steps: int) -> None:
    """Print how a step differs from the recording. `num_steps`: the number of steps in the recording."""
    from engine.client.untrusted import for_stdout

    print(f"step {difference.number} ({difference.runner}) differs, the first of {num_steps:,}:")
    if difference.error_now:
        print(f"  it fails: {for_stdout(difference.error_now)}")
    if difference.tokens is None or difference.tokens_now is None:
        return
    for s, request_id in enumerate(difference.batch.ids):
        recorded_ids, new_ids = difference.tokens[s], difference.tokens_now[s]
        if recorded_ids != new_ids:
            print(f"  {for_stdout(request_id)}: recorded {recorded_ids}, now {new_ids}")
