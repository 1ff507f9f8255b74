"""C files of this package, compiled by this machine's compiler when they are first needed. Part 12.

Promises the library, or None: there is no compiler, the compiler refuses (a source says which processors it
is for), or there is no folder to load from. The caller then computes without it, and `why_not` gives the
reason. Libraries are cached for the user (XDG_CACHE_HOME, else ~/.cache), one for each source, compiler and
processor; if others could write there, in a folder of this process alone. A library that cannot be loaded is
not cached, and one that is damaged is compiled anew. The environment variable CC names another compiler.
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

COMPILER_TIMEOUT = 120  # seconds
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC"]
CPU = Path("/proc/cpuinfo")


def load(source: Path, *flags: str) -> ctypes.CDLL | None:
    """The library of this C file, compiled with FLAGS and these; None: see `why_not`."""
    return _loaded(source, flags)[0]


def why_not(source: Path, *flags: str) -> str:
    """Why `load` gives None, in a line; "" if it gives a library."""
    return _loaded(source, flags)[1]


@cache
def _loaded(source: Path, flags: tuple[str, ...]) -> tuple[ctypes.CDLL | None, str]:
    """(the library, why there is none)"""
    try:
        command = [*compiler(), *FLAGS, *flags]
        folder, name = _folder(), _name(source, command)
        for library in folder.glob(f"{name}-*.so"):
            if library.name == _cached_name(name, library):  # to load a damaged file may end the process
                return ctypes.CDLL(str(library)), ""
        return _compile(source, command, folder, name), ""
    except subprocess.CalledProcessError as error:
        errors = [line for line in error.stderr.splitlines() if "error" in line]
        return None, errors[0] if errors else f"{command[0]} exited with {error.returncode}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return None, str(error)


def compiler() -> list[str]:
    """The compiler's command: `CC`, else the first there is of cc, gcc and clang.

    Raises FileNotFoundError: there is none; ValueError for a `CC` that is no command.
    """
    CC = os.environ.get("CC", "")
    try:
        if command := shlex.split(CC):
            return command
    except ValueError as error:
        raise ValueError(f"CC={CC!r} is no command: {error}") from None
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("there is no C compiler: neither cc nor gcc nor clang")


def _name(source: Path, command: list[str]) -> str:
    """The library's name, with a digest of all that it depends on: the source, the command, and the
    processor, for which `-march=native` compiles.
    """
    lines = CPU.read_text("utf-8", errors="replace").splitlines() if CPU.exists() else []
    features = {line for line in lines if line.startswith(("flags", "Features"))}
    depends_on = [source.read_text("utf-8"), *command, platform.machine(), platform.processor()]
    return f"{source.stem}-{_digest(chr(0).join([*depends_on, *sorted(features)]).encode())}"


def _cached_name(name: str, library: Path) -> str:
    """The file's name in the cache, which ends with a digest of its content."""
    return f"{name}-{_digest(library.read_bytes())}.so"


def _digest(content: bytes) -> str:
    """64 bits of SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(source: Path, command: list[str], folder: Path, name: str) -> ctypes.CDLL:
    """Compile the source, and cache the library. In a temporary folder first: other processes may compile it,
    or look for it, at the same time. Raises OSError or subprocess.SubprocessError.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        file = Path(temporary) / f"{name}.so"
        subprocess.run(
            [*command, str(source), "-o", str(file)], env={**os.environ, "LC_ALL": "C"},
            check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", timeout=COMPILER_TIMEOUT,
        )  # fmt: skip
        try:
            library = ctypes.CDLL(str(file))
        except OSError as error:
            raise OSError(f"what {command[0]} made cannot be loaded: {error}") from None
        file.replace(folder / _cached_name(name, file))
        return library


@cache
def _folder() -> Path:
    """Where libraries are cached. A library may do all that this user may, so nobody else may write there."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not root.is_absolute():  # then it is to be ignored, says its specification
            root = Path.home().absolute() / ".cache"
        folder = root / "ruvon"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _only_ours(folder):
            return folder
    except (OSError, RuntimeError):  # there is no home, or nothing may be written there
        pass
    temporary = tempfile.mkdtemp(prefix="ruvon-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def _only_ours(folder: Path) -> bool:
    """Whether this user may write there and nobody else; False where the system has no user ids."""
    status = folder.stat()
    is_owner = hasattr(os, "getuid") and status.st_uid == os.getuid()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_owner and not others_write and os.access(folder, os.W_OK)
