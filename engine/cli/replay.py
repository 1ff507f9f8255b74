"""`ruvon replay`: runs the steps in a file of `--record` again and compares the tokens. Part 20's wiring."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.options import refusals


def replay(
    file: Annotated[Path, typer.Argument(help="A file that --record wrote.")],
    model: Annotated[
        str | None, typer.Option(help="The model's name or folder here; default: as recorded.")
    ] = None,
) -> None:
    """Run every step of a recording again, and say where its tokens differ. Exit status 1: somewhere."""
    from engine.client.untrusted import for_stdout, printable
    from engine.execution.recording import Compared
    from engine.models.checkpoint import CheckpointError
    from engine.wiring.loading import one_thread_if_small
    from engine.wiring.replay import args_of
    from engine.wiring.replay import replay as run

    num_steps = num_tokens = 0
    difference: Compared | None = None  # the first step that differs
    with refusals("replay"):
        try:
            args = args_of(file)
            one_thread_if_small(model or args.model, args.model_impl)
            for compared in run(file, model):
                num_steps += 1
                num_tokens += sum(map(len, compared.tokens_now or ()))
                if compared.error:
                    print(
                        f"step {compared.step}: failed when it was recorded: {printable(compared.error)}",
                        file=sys.stderr,
                    )
                if not compared.is_equal and difference is None:
                    difference = compared
        except (CheckpointError, ValueError, OSError) as error:  # the message may quote a stranger's file
            raise ValueError(printable(" ".join(str(error).split()))) from None
    if difference is None:
        print(f"{num_steps:,} steps, {num_tokens:,} tokens: all as recorded")
        return
    print(f"step {difference.step} ({difference.runner}) differs, the first of {num_steps:,}:")
    if difference.error_now:
        print(f"  it fails: {for_stdout(difference.error_now)}")
    tokens_of_each = zip(difference.batch.ids, difference.tokens or (), difference.tokens_now or ())
    for request_id, recorded_ids, new_ids in tokens_of_each:
        if recorded_ids != new_ids:
            print(f"  {for_stdout(request_id)}: recorded {recorded_ids}, now {new_ids}")
    raise typer.Exit(1)
