"""pytest in many trees without importing torch for each: a process imports the libraries, and forks per run.

    with Warm() as warm:
        run = warm.pytest(tree, ["tests/part03", "-x"])

A run is what a learner would see in `tree`: its own engine, without this process's settings and paths, and
without the data folder. The file is also the program of that process (`python parts/warm.py`), and as such
imports nothing of `parts` or `engine`, which belong to the trees. Needs `os.fork`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# What the tests of any part import. A library that is not installed is left to the test that misses it.
LIBRARIES = (
    "_pytest.assertion",
    "fastapi",
    "httpx",
    "hypothesis.strategies",
    "jinja2",
    "numpy",
    "openai",
    "pytest",
    "regex",
    "safetensors.torch",
    "tokenizers",
    "torch",
    "transformers.generation",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "uvicorn",
)
NOT_LOADED = ("nbval", "schemathesis")  # pytest's settings say so
ENDED = (0, 1, 5)  # pytest's exit codes: all passed, some failed, there was nothing to run
NOT_THE_LEARNERS = ("BUILD_NUMBER", "CI", "COV_", "PYTEST_", "PYTHONDONTWRITE", "PYTHONPATH", "RUVON_")


@dataclass(frozen=True)
class Failure:
    """One test that failed, or one file that could not be collected."""

    test: str  # pytest's node id, or the file
    report: str  # pytest's text about it, captured log included

    @property
    def path(self) -> str:
        return self.test.partition("::")[0]


@dataclass(frozen=True)
class Run:
    """What the tests in one tree said."""

    engine: str | None  # the file of the engine that they imported; None: they imported none
    passed: dict[str, str]  # node id -> what it logged and printed
    skipped: tuple[str, ...]  # node ids, or files
    failures: tuple[Failure, ...]  # in the order in which they came
    output: str  # what was printed
    seconds: float
    problem: str  # why there are no more results than these; empty: pytest came to its end

    @property
    def last_lines(self) -> str:
        """The last five lines of what was printed."""
        return "\n".join(self.output.rstrip().splitlines()[-5:])


class Warm:
    """The process that forks. One run at a time; for more at once, make more of them."""

    def __init__(self) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith(NOT_THE_LEARNERS)}
        env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONNODEBUGRANGES": "1"}
        if not shutil.which(
            "nvidia-smi"
        ):  # as tests/conftest.py, which comes after transformers and triton here
            env |= {"TRITON_INTERPRET": "1"}
        env |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # to ask for a GPU must not start CUDA before the fork
        command = [sys.executable, str(Path(__file__).resolve())]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, encoding="utf-8")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs, self._answers = self._process.stdin, self._process.stdout

    def pytest(
        self,
        tree: Path,
        arguments: list[str],
        seconds: float,
        env: dict[str, str] | None = None,
        once: bool = False,
    ) -> Run:
        """Run pytest in `tree`, `env` added; one that takes longer than `seconds` is killed. `once`: a file
        in which a test has failed is left there, and its other tests count as skipped.
        """
        job = {"tree": str(tree), "arguments": arguments, "seconds": seconds, "env": env or {}, "once": once}
        print(json.dumps(job), file=self._jobs, flush=True)
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"the process that runs pytest is gone, with exit code {self._process.wait()}")
        raw = json.loads(answer)
        failures = tuple(Failure(*failure) for failure in raw["failures"])
        return Run(**raw | {"failures": failures, "skipped": tuple(raw["skipped"])})

    def __enter__(self) -> "Warm":
        return self

    def __exit__(self, *_) -> None:
        self._jobs.close()  # it ends when there is nothing more to read
        self._process.wait()


def _serve() -> None:
    """The process itself: read a job, fork, answer."""
    import gc
    import inspect
    from importlib import import_module, metadata

    sys.path.remove(str(Path(__file__).resolve().parent))
    for library in LIBRARIES:
        with suppress(ImportError):
            import_module(library)
    found = metadata.entry_points(group="pytest11")
    plugins = [plugin.load() for plugin in found if plugin.name not in NOT_LOADED]
    inspect.getmodule(compile("", "nowhere", "exec"))  # where each module's file is, for the first traceback
    gc.collect()
    gc.freeze()  # what is imported stays: the children's collector need not look at it
    for line in sys.stdin:
        print(json.dumps(_fork(plugins, **json.loads(line))), flush=True)


def _fork(
    plugins: list, tree: str, arguments: list[str], seconds: float, env: dict[str, str], once: bool
) -> dict:
    start = time.monotonic()
    result, log = Path(f"{tree}.json"), Path(f"{tree}.log")
    result.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # so that what it starts can be ended with it
        os.environ.update(env)
        _pytest([*plugins, _OnceAFile()] if once else plugins, tree, arguments, result, log)
    killed = not _ends(child, start + seconds)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it started and left behind
    found: dict = {
        "engine": None,
        "passed": {},
        "skipped": [],
        "failures": [],
        "problem": "pytest itself crashed",
    }
    if killed:
        found["problem"] = f"pytest did not end within {seconds:g} seconds"
    elif result.exists():
        found = json.loads(result.read_text())
        code = found.pop("code")
        stopped = f"pytest stopped with exit code {code}, and no test had failed"  # a broken conftest.py
        found["problem"] = "" if code in ENDED or found["failures"] else stopped
    return found | {"output": log.read_text(errors="replace"), "seconds": time.monotonic() - start}


def _ends(child: int, deadline: float) -> bool:
    """Wait for the child; False when it had to be killed."""
    pause = 0.002
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def _pytest(plugins: list, tree: str, arguments: list[str], result: Path, log: Path) -> None:
    """The child: pytest, its output and its reports in files, and no way back.

    The plugins are those that pytest would look for among all that is installed, in every run anew.
    """
    import pytest

    code = 1
    try:
        os.chdir(tree)
        sys.path.insert(0, tree)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the next job is not for the tests to read
        recorder = _Recorder()
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main([*arguments, *ignored], [*plugins, recorder])
        engine = getattr(sys.modules.get("engine"), "__file__", None)
        result.write_text(json.dumps({"engine": engine, "code": int(code)} | vars(recorder)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(int(code))


class _Recorder:
    """A pytest plugin that keeps what passed and what failed."""

    def __init__(self) -> None:
        self.passed: dict[str, str] = {}
        self.skipped: list[str] = []
        self.failures: list[tuple[str, str]] = []

    def pytest_configure(self) -> None:
        del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]  # it is not for what the tests start

    def pytest_runtest_logreport(self, report) -> None:
        if report.passed and report.when == "call":
            self.passed[report.nodeid] = "\n".join(text for _, text in report.sections)
        if report.skipped:
            self.skipped.append(report.nodeid)
        if report.failed:
            self.failures.append((report.nodeid, f"{report.longreprtext}\n{report.caplog}"))

    def pytest_collectreport(self, report) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)
        if report.failed:
            self.failures.append((report.nodeid, report.longreprtext))


class _OnceAFile:
    """A pytest plugin that skips what is left of a file in which a test has failed."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    def pytest_runtest_setup(self, item) -> None:
        if item.nodeid.partition("::")[0] in self.failed:
            import pytest

            pytest.skip("another test of this file has failed")

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed.add(report.nodeid.partition("::")[0])


if __name__ == "__main__":
    _serve()
