"""C of ours, made machine code by this machine's own compiler when it is first needed. Part 12.

Promises the library, or None where there is no compiler, where it refuses (a source says which processors it
is for), or where nothing may be loaded from: then whoever asked goes another way, and `why_not` says why. It
is kept in the user's cache (XDG_CACHE_HOME, else ~/.cache), one for each source, compiler and processor; if
others could write there, in a folder of this process alone. `CC` names another compiler.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC"]
PATIENCE = 120  # seconds for the compiler
CPU = Path("/proc/cpuinfo")


def load(source: Path, *flags: str) -> ctypes.CDLL | None:
    """The library of this source, compiled with these flags beside FLAGS."""
    return _loaded(source, flags)[0]


def why_not(source: Path, *flags: str) -> str:
    """Why there is none; nothing, if there is."""
    return _loaded(source, flags)[1]


@cache
def _loaded(source: Path, flags: tuple[str, ...]) -> tuple[ctypes.CDLL | None, str]:
    try:
        command = [*compiler(), *FLAGS, *flags]
        library = _folder() / _name(source, command)
        if not library.exists():
            _compile(source, command, library)
        return ctypes.CDLL(str(library)), ""
    except subprocess.CalledProcessError as error:
        told = [line for line in error.stderr.splitlines() if "error" in line]
        return None, told[0] if told else f"{command[0]} exited with {error.returncode}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return None, str(error)


def compiler() -> list[str]:
    """Its command. Raises FileNotFoundError, or ValueError for a `CC` that is no command."""
    if command := shlex.split(os.environ.get("CC", "")):
        return command
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("there is no C compiler: neither cc nor gcc nor clang")


def _name(source: Path, command: list[str]) -> str:
    """Another for everything that the result depends on; `-march=native` depends on the processor."""
    lines = CPU.read_text("utf-8", errors="replace").splitlines() if CPU.exists() else []
    can = {line for line in lines if line.startswith(("flags", "Features"))}
    told = [source.read_text(), *command, platform.machine(), platform.processor(), *sorted(can)]
    return f"{source.stem}-{hashlib.sha256(chr(0).join(told).encode()).hexdigest()[:16]}.so"


def _compile(source: Path, command: list[str], library: Path) -> None:
    """Elsewhere first: others may be at it, or look for it, at the same time. Raises OSError or
    subprocess.SubprocessError.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        subprocess.run(
            [*command, str(source), "-o", str(made)],
            check=True, capture_output=True, text=True, errors="replace", timeout=PATIENCE,
        )  # fmt: skip
        made.replace(library)


@cache
def _folder() -> Path:
    """Where libraries are kept. What is loaded from there may do all that this user may, so nobody else may
    write there.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ruvon"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        own = about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if own and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # there is no home, or nothing may be written there
        pass
    folder = tempfile.mkdtemp(prefix="ruvon-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
