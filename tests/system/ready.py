"""Processes of Python that need not import torch for seconds: one has imported it, and forks for each.

    with Popen([sys.executable, "-m", "engine.cli.main", "serve"], cwd=ROOT, env=ENVIRONMENT) as process:
    done = ruvon("models")

A new process has its own files, folder, environment, signals and exit code, imports the engine itself, and
ends as Python ends; only its parent is another. The file is also the program of the one that forks, which
imports nothing of `engine`: a test may change a module before others import it.
"""

import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import F_DUPFD, fcntl
from functools import cache
from importlib import import_module
from pathlib import Path
from select import select
from types import ModuleType, SimpleNamespace

LIBRARIES = (
    "fastapi", "httpx", "jinja2", "prometheus_client", "regex", "rich.progress", "safetensors.torch", "torch",
    "typer", "uvicorn",
)  # fmt: skip
FIXED = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # read while the libraries are imported
WIDE = {"COLUMNS": "200"}  # or the digits of a time that was measured decide where a line is broken
ROOT = Path(__file__).parents[2]
LOCK = threading.Lock()


class Popen(subprocess.Popen):
    """`python -m MODULE ARGUMENTS` or `python -c CODE ARGUMENTS`. It finds `libraries` imported, as with
    `settings` in the environment. With -P before, modules come from PYTHONPATH and not from its folder.
    `start_new_session`: it leads a group of its own, which signals reach. `pass_fds` keep their numbers.
    """

    libraries, settings = LIBRARIES, FIXED

    def __init__(
        self, command, cwd=ROOT, env=None, stdin=None, stdout=None, stderr=None, text=None, encoding=None,
        start_new_session=False, pass_fds=(),
    ) -> None:  # fmt: skip
        self._job = {"command": command[1:], "cwd": str(cwd), "env": dict(env or os.environ) | FIXED}
        self._job |= {"leads": start_new_session, "passed": list(pass_fds)}
        super().__init__(command, stdin=stdin, stdout=stdout, stderr=stderr, text=text, encoding=encoding)

    def _execute_child(self, *arguments) -> None:
        handles = arguments[-13:-7]  # read and write end of stdin, stdout, stderr
        own = [fd if fd != -1 else number for number, fd in enumerate((handles[0], handles[3], handles[5]))]
        self._told, tells = os.pipe()
        with LOCK:
            handed = [*own, tells, *self._job["passed"]]
            socket.send_fds(_forks(type(self)), [json.dumps(self._job).encode()], handed)
        os.close(tells)
        self._close_pipe_fds(*handles)
        self.pid = self._read()
        self._child_created = True

    def _wait(self, timeout: float | None) -> int:
        if not self._waitpid_lock.acquire(timeout=-1 if timeout is None else max(0, timeout)):
            raise subprocess.TimeoutExpired(self.args, timeout)  # another thread waits
        try:
            if self.returncode is None:
                if not select([self._told], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                self._handle_exitstatus(self._read())
                os.close(self._told)
        finally:
            self._waitpid_lock.release()
        return self.returncode

    def _internal_poll(self, _deadstate=None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _read(self) -> int:
        said = os.read(self._told, 8)
        if not said:
            raise RuntimeError("the process that forks is gone")
        return int.from_bytes(said, "little")


@contextmanager
def forking(module: ModuleType, kind: type[Popen] = Popen) -> Iterator[None]:
    """Inside, what `module` starts by `subprocess` forks, as this kind does."""
    theirs = module.subprocess
    module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": kind})
    try:
        yield
    finally:
        module.subprocess = theirs


def ruvon(*arguments: str, **options) -> subprocess.CompletedProcess:
    """The command as from a shell, `WIDE`, to its end: what it gives on both channels. `options`: run's."""
    return run([sys.executable, "-m", "engine.cli.main", *arguments], **{"env": os.environ | WIDE} | options)


def run(command, timeout: float = 600.0, kind: type[Popen] = Popen, **options) -> subprocess.CompletedProcess:
    """As subprocess.run, its text captured."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"} | options
    with kind(command, **options) as process:
        try:
            said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, *said)


@cache
def _forks(kind: type[Popen]) -> socket.socket:
    """The way to the process that forks for this kind; it ends with this one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(its.fileno()), *kind.libraries]
    subprocess.Popen(command, cwd=ROOT, env=os.environ | kind.settings, pass_fds=[its.fileno()])
    its.close()
    return ours


def _serve(asks: socket.socket, libraries: list[str]) -> dict | None:
    """Fork for each job: a process that waits and tells, and the one it waits for, which returns its job."""
    for library in libraries:
        with suppress(ImportError):
            import_module(library)
    gc.freeze()  # what is imported stays: the collector need not look at it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child of this one is waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for pytest, which then closes the socket
    while True:
        job, files, _, _ = socket.recv_fds(asks, 2**20, 8)
        if not job:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asks.close()
            job = json.loads(job)
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                numbers = [0, 1, 2, *job["passed"]]
                copies = [fcntl(fd, F_DUPFD, max(numbers) + 1) for fd in files[:3] + files[4:]]
                for fd in files:
                    os.close(fd)
                for number, fd in zip(numbers, copies, strict=True):
                    os.dup2(fd, number)
                    os.close(fd)
                if job["leads"]:
                    os.setpgid(0, 0)
                return job
            for fd in files[:3] + files[4:]:
                os.close(fd)
            if job["leads"]:
                with suppress(PermissionError, ProcessLookupError):  # the child was quicker
                    os.setpgid(child, child)
            os.write(files[3], child.to_bytes(8, "little"))
            os.write(files[3], os.waitpid(child, 0)[1].to_bytes(8, "little"))
            os._exit(0)
        for fd in files:
            os.close(fd)


def _become(job: dict) -> None:
    """Run the job as Python would have."""
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    unbuffered = {"buffering": 0} if job["env"].get("PYTHONUNBUFFERED") else {}
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "wb" if number else "rb", closefd=False, **(unbuffered if number else {}))  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace" if number == 2 else "strict",
            line_buffering=number == 2 or raw.isatty(), write_through=bool(unbuffered),
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if job["command"][0] == "-P":
        sys.path[:1] = job["env"].get("PYTHONPATH", "").split(os.pathsep)
        del job["command"][0]
    else:
        sys.path[0] = job["cwd"]
    kind, what, *arguments = job["command"]
    sys.argv = ["-c", *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))


if __name__ == "__main__" and (job := _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])):
    _become(job)
