"""Compiles C files of this package with this machine's compiler when they are first needed. Part 12.

`load` returns the library. It returns None if there is no compiler, if the compiler refuses the source (a
source says which processors it supports), or if no folder can hold the library. The caller then computes
without the library, and `why_not` gives the reason.

Libraries are cached in the user's cache folder (XDG_CACHE_HOME, else ~/.cache), one for each source, command
and processor. If this user cannot write to the folder, or other users can, libraries lie in a temporary
folder of this process instead. A library that cannot be loaded is not cached. A damaged library is compiled
again. The environment variable CC selects another compiler.
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
from typing import NamedTuple

COMPILER_TIMEOUT = 120  # seconds
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC"]
CPUINFO = Path("/proc/cpuinfo")  # on Linux: lists the features of each core


def load(source: Path, *flags: str) -> ctypes.CDLL | None:
    """Load the library of a C file, compiled with FLAGS and `flags`.

    Returns None if there is no such library; `why_not` gives the reason. The first call compiles the file.
    Later calls with the same arguments return the same object.
    """
    return _loaded(source, flags).library


def why_not(source: Path, *flags: str) -> str:
    """Why `load` returns None for these arguments, in one line; "" if `load` returns a library."""
    return _loaded(source, flags).why_not


class _Loaded(NamedTuple):
    """A library, or the reason why there is none."""

    library: ctypes.CDLL | None
    why_not: str = ""


@cache
def _loaded(source: Path, flags: tuple[str, ...]) -> _Loaded:
    """The library of `source`, from the cache or compiled now."""
    try:
        command = [*compiler(), *FLAGS, *flags]
        folder, name = _folder(), _name(source, command)
        for library in folder.glob(f"{name}-*.so"):
            if library.name == _cached_name(name, library):  # loading a damaged file may kill the process
                return _Loaded(ctypes.CDLL(str(library)))
        return _Loaded(_compile(source, command, folder, name))
    except subprocess.CalledProcessError as error:
        reason = f"{command[0]} exited with {error.returncode}"
        errors = [line for line in error.stderr.splitlines() if "error" in line]
        return _Loaded(None, errors[0] if errors else reason)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return _Loaded(None, str(error))


def compiler() -> list[str]:
    """The compiler's command and its arguments: the environment variable CC, else the first of cc, gcc and
    clang that is installed.

    Raises FileNotFoundError if none of them is installed, and ValueError if CC cannot be split into words.
    """
    setting = os.environ.get("CC", "")
    try:
        command = shlex.split(setting)
    except ValueError as error:
        raise ValueError(f"CC={setting!r} is no command: {error}") from None
    if command:
        return command
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("there is no C compiler: neither cc nor gcc nor clang")


def _name(source: Path, command: list[str]) -> str:
    """The library's name. It holds a digest of everything that the library depends on: the source, the
    command, and the processor, because `-march=native` compiles for this processor alone.
    """
    lines = CPUINFO.read_text("utf-8", errors="replace").splitlines() if CPUINFO.exists() else []
    features = {line for line in lines if line.startswith(("flags", "Features"))}  # a set: cores are alike
    depends_on = [source.read_text("utf-8"), *command, platform.machine(), platform.processor()]
    depends_on += sorted(features)
    content = "\0".join(depends_on).encode()
    return f"{source.stem}-{_digest(content)}"


def _cached_name(name: str, library: Path) -> str:
    """The library's file name in the cache. It ends with a digest of the library's content."""
    return f"{name}-{_digest(library.read_bytes())}.so"


def _digest(content: bytes) -> str:
    """The first 64 bits of SHA-256, as 16 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(source: Path, command: list[str], folder: Path, name: str) -> ctypes.CDLL:
    """Compile the source, load the library, and move the library into the cache.

    The compiler writes to a temporary folder, because other processes may compile the same source, or look
    for its library, at the same time. Raises OSError or subprocess.SubprocessError.
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
    """The folder where libraries are cached. No other user may write there: a user that can change a library
    can run code as this user.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not root.is_absolute():  # the XDG specification says to ignore a relative path
            root = Path.home().absolute() / ".cache"
        folder = root / "ruvon"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder):
            return folder
    except (OSError, RuntimeError):  # this user has no home folder, or may not write to it
        pass
    temporary = tempfile.mkdtemp(prefix="ruvon-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def _is_private(folder: Path) -> bool:
    """Whether this user, and no other user, may write to the folder. False if the system has no user ids."""
    status = folder.stat()
    is_owner = hasattr(os, "getuid") and status.st_uid == os.getuid()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_owner and not others_write and os.access(folder, os.W_OK)
