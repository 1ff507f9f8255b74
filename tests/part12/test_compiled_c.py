"""C is compiled once, kept where nobody else may write, and whoever cannot have it is told why."""

import os
import subprocess
import sys
import textwrap

import pytest

from engine import compiled

SOURCE = "int answer(void) { return ANSWER; }\n"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="a C compiler as Linux and macOS have it")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source of its own, and a cache of its own; no compiler flags that a system may lack."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiled, "FLAGS", ["-O1", "-shared", "-fPIC"])
    for function in (compiled._loaded, compiled._folder):
        function.cache_clear()
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    yield path
    for function in (compiled._loaded, compiled._folder):
        function.cache_clear()


def again():
    compiled._loaded.cache_clear()


@pytest.fixture
def has_compiler():
    try:
        compiled.compiler()
    except FileNotFoundError:
        pytest.skip("no C compiler here")


@pytest.mark.usefixtures("has_compiler")
def test_it_is_compiled_once_and_kept(source, tmp_path, monkeypatch):
    assert compiled.load(source, "-DANSWER=42").answer() == 42
    (kept,) = (tmp_path / "cache" / "ruvon").iterdir()
    again()

    def refuse(*_, **__):
        raise AssertionError("it lies there already")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert compiled.load(source, "-DANSWER=42").answer() == 42
    assert list(kept.parent.iterdir()) == [kept]


@pytest.mark.usefixtures("has_compiler")
def test_another_source_or_flag_or_processor_is_another_library(source, tmp_path, monkeypatch):
    assert compiled.load(source, "-DANSWER=1").answer() == 1
    assert compiled.load(source, "-DANSWER=2").answer() == 2
    again()
    source.write_text(SOURCE.replace("ANSWER", "ANSWER + 1"))
    assert compiled.load(source, "-DANSWER=1").answer() == 2
    again()
    (tmp_path / "cpuinfo").write_text("flags : sse9\n")
    monkeypatch.setattr(compiled, "CPU", tmp_path / "cpuinfo")
    assert compiled.load(source, "-DANSWER=1").answer() == 2
    assert len(list((tmp_path / "cache" / "ruvon").iterdir())) == 4


def test_no_compiler(source, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert compiled.load(source) is None
    assert compiled.why_not(source) == "there is no C compiler: neither cc nor gcc nor clang"


@pytest.mark.parametrize(
    ("command", "says"),
    [("/nowhere/gcc -m64", "/nowhere/gcc"), ("false", "false"), ("'unclosed", "quotation")],
)
def test_a_compiler_that_is_none_is_named(source, monkeypatch, command, says):
    monkeypatch.setenv("CC", command)
    assert compiled.load(source) is None
    assert says in compiled.why_not(source)


@pytest.mark.usefixtures("has_compiler")
def test_a_source_that_refuses_this_processor_says_so(source, tmp_path):
    source.write_text('#error "this processor has no VNNI"\n')
    assert compiled.load(source) is None
    assert "this processor has no VNNI" in compiled.why_not(source)
    assert list((tmp_path / "cache" / "ruvon").iterdir()) == [], "and leaves nothing behind"


@pytest.mark.usefixtures("has_compiler")
def test_a_compiler_that_never_ends_is_not_waited_for(source, tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(compiled, "PATIENCE", 0.2)
    assert compiled.load(source) is None
    assert "timed out" in compiled.why_not(source)


@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_nothing_is_loaded_from_where_others_may_write(source, tmp_path, mode):
    folder = tmp_path / "cache" / "ruvon"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert compiled.load(source, "-DANSWER=3").answer() == 3, "from a folder of this process alone"
    assert list(folder.iterdir()) == []
    assert compiled._folder() != folder
    assert compiled._folder().stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("has_compiler")
def test_without_a_home_it_is_kept_by_this_process_alone(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled.load(source, "-DANSWER=4").answer() == 4


@pytest.mark.usefixtures("has_compiler")
def test_many_may_come_at_once(source, tmp_path):
    code = f"""
        from pathlib import Path
        from engine import compiled
        compiled.FLAGS = {compiled.FLAGS}
        print(compiled.load(Path({str(source)!r}), "-DANSWER=5").answer())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    many = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert [one.communicate(timeout=60)[0] for one in many] == ["5\n"] * 6
    assert len(list((tmp_path / "cache" / "ruvon").iterdir())) == 1
