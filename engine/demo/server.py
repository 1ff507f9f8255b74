"""`ruvon serve` in a process of its own, for the length of a `with`. Part 20's wiring.

Runs nothing of the engine itself: whoever draws or measures here takes nothing from the server's steps.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from engine.wiring.engine_args import EngineArgs

ROOT = Path(__file__).parents[2]  # the folder that has the package
START_SECONDS = 240  # for a server to load its model


def to_flags(args: EngineArgs) -> list[str]:
    """The flags of `ruvon serve` that mean `args`, without those that say the default."""
    flags = []
    for spec in fields(EngineArgs):
        value, name = getattr(args, spec.name), spec.name.replace("_", "-")
        if value == spec.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            for item in value:
                flags += [f"--{name}", str(item)]
        else:
            flags += [f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return flags


def environment() -> dict[str, str]:
    """This process's environment, with which a child process imports this very package."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def free_port(port: int, host: str = "127.0.0.1") -> int:
    """`port` if it is free; else 0, with which a server takes any free port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((host, port))
        except OSError:
            return 0
    return port


@contextmanager
def served(
    log: Path, *arguments: str, env: Mapping[str, str] | None = None, port: int = 0
) -> Iterator[tuple[str, int]]:
    """Run `ruvon serve` with these arguments, and give its URL and process id. Its output goes to `log`.

    Raises RuntimeError, with that output: the server did not start.
    """
    command = [sys.executable, "-m", "engine.cli.main", "serve", "--port", str(port), *arguments]
    variables = (environment() if env is None else dict(env)) | {"PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (address := re.search(r"Uvicorn running on (http://\S+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield address[1], process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
