"""C of ours, made machine code by this machine's own compiler when it is first needed. Part 12.

Promises the library, or None where there is no compiler, where it refuses (a source says which processors it
is for), or where nothing may be loaded from: then whoever asked goes another way, and `why_not` says why. It
is kept in the user's cache (XDG_CACHE_HOME, else ~/.cache), one for each source, compiler and processor; if
others could write there, in a folder of this process alone. What cannot be loaded is not kept, and what is
damaged there is made anew. `CC` names another compiler.
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
        folder, name = _folder(), _name(source, command)
        for kept in folder.glob(f"{name}-*.so"):
            if kept.name == _kept_as(name, kept):  # one that was cut short ends the process that loads it
                return ctypes.CDLL(str(kept)), ""
        return _compile(source, command, folder, name), ""
    except subprocess.CalledProcessError as error:
        told = [line for line in error.stderr.splitlines() if "error" in line]
        return None, told[0] if told else f"{command[0]} exited with {error.returncode}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return None, str(error)


def compiler() -> list[str]:
    """Its command. Raises FileNotFoundError, or ValueError for a `CC` that is no command."""
    named = os.environ.get("CC", "")
    try:
        if command := shlex.split(named):
            return command
    except ValueError as error:
        raise ValueError(f"CC={named!r} is no command: {error}") from None
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("there is no C compiler: neither cc nor gcc nor clang")


def _name(source: Path, command: list[str]) -> str:
    """Another for everything that the result depends on; `-march=native` depends on the processor."""
    lines = CPU.read_text("utf-8", errors="replace").splitlines() if CPU.exists() else []
    can = {line for line in lines if line.startswith(("flags", "Features"))}
    told = [source.read_text("utf-8"), *command, platform.machine(), platform.processor(), *sorted(can)]
    return f"{source.stem}-{_digest(chr(0).join(told).encode())}"


def _kept_as(name: str, library: Path) -> str:
    """Its file's name, which says what is in it."""
    return f"{name}-{_digest(library.read_bytes())}.so"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(source: Path, command: list[str], folder: Path, name: str) -> ctypes.CDLL:
    """Elsewhere first: others may be at it, or look for it, at the same time. Raises OSError or
    subprocess.SubprocessError.
    """
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / f"{name}.so"
        subprocess.run(
            [*command, str(source), "-o", str(made)], env={**os.environ, "LC_ALL": "C"},
            check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", timeout=PATIENCE,
        )  # fmt: skip
        try:
            library = ctypes.CDLL(str(made))
        except OSError as error:
            raise OSError(f"what {command[0]} made cannot be loaded: {error}") from None
        made.replace(folder / _kept_as(name, made))
        return library


@cache
def _folder() -> Path:
    """Where libraries are kept. What is loaded from there may do all that this user may, so nobody else may
    write there.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not root.is_absolute():  # to be ignored then, says its specification
            root = Path.home().absolute() / ".cache"
        folder = root / "ruvon"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _only_ours(folder):
            return folder
    except (OSError, RuntimeError):  # there is no home, or nothing may be written there
        pass
    folder = tempfile.mkdtemp(prefix="ruvon-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _only_ours(folder: Path) -> bool:
    """This user may write there and nobody else; False where a system has no user ids to tell by."""
    about = folder.stat()
    own = hasattr(os, "getuid") and about.st_uid == os.getuid()
    return own and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK)
