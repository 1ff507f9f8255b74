"""Runs `ruvon serve` in a process of its own, for the length of a `with` block. Part 20's wiring.

The engine runs in the server's process only, so drawing or measuring in this process holds up no step.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

from engine.wiring.engine_args import EngineArgs

ROOT = Path(__file__).parents[2]  # the folder that contains the package `engine`
START_SECONDS = 240  # for a server to load its model and start
STOP_SECONDS = 60  # for a server to end, before it is killed
ANY_PORT = 0  # a server that is given this port takes any free port


def to_flags(args: EngineArgs) -> list[str]:
    """The flags of `ruvon serve` that give the same EngineArgs. Flags for default values are left out."""
    flags = []
    for spec in fields(EngineArgs):
        value, name = getattr(args, spec.name), spec.name.replace("_", "-")
        if value == spec.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            flags += [f"--{name}", json.dumps(value)]
        else:
            flags += [f"--{name}", str(value)]
    return flags


def environment() -> dict[str, str]:
    """This process's environment, with PYTHONPATH changed so that a child process imports this package."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def is_free(port: int) -> bool:
    """Whether `port` is free on 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server sets this option, too
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _start(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen:
    """Start a process with the environment `env`. Its output replaces the content of `log`."""
    with log.open("w") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


def _url_in(log: Path) -> str | None:
    """The URL at which the server of this log listens; None before it does."""
    address = re.search(r"Uvicorn running on (http://\S+)", log.read_text())
    return None if address is None else address[1]


def _url_once_served(process: subprocess.Popen, log: Path, deadline: float) -> str | None:
    """Wait until the server listens, and return its URL. Returns None if the process ends first, or at the
    time `deadline`, in seconds of time.monotonic().
    """
    while (url := _url_in(log)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return url


@contextmanager
def served(
    log: Path, *arguments: str, env: Mapping[str, str] | None = None, port: int = ANY_PORT
) -> Iterator[tuple[str, int]]:
    """Run `ruvon serve` with these arguments inside the `with` block, which gets the server's URL and process
    id. Stdout and stderr go to the file `log`. `env` is by default that of `environment`. The server takes
    `port` if it is free, and otherwise any free port, as with ANY_PORT. A server that does not end within
    STOP_SECONDS after the block is killed.

    Raises RuntimeError with the server's output if the server does not start within START_SECONDS.
    """
    variables = environment() if env is None else dict(env)
    variables["PYTHONUNBUFFERED"] = "1"  # otherwise the log would not have the URL at once
    serve = [sys.executable, "-m", "engine.cli.main", "serve", *arguments]
    if not is_free(port):
        port = ANY_PORT
    process = _start([*serve, "--port", str(port)], variables, log)
    try:
        deadline = time.monotonic() + START_SECONDS
        url = _url_once_served(process, log, deadline)
        has_ended = process.poll() is not None
        if url is None and has_ended and not is_free(port):  # another process has taken the port meanwhile
            process = _start([*serve, "--port", str(ANY_PORT)], variables, log)
            url = _url_once_served(process, log, deadline)
        if url is None:
            raise RuntimeError(f"the server did not start:\n{log.read_text()}")
        yield url, process.pid
    finally:
        process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        finally:  # also after an interrupt
            process.kill()
            process.wait()
