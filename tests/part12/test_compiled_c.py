"""C is compiled once, kept where nobody else may write, and whoever cannot have it is told why."""

import os
import subprocess
import sys
import textwrap

import pytest

from engine.machine import compiled

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
    monkeypatch.setattr(compiled, "CPUINFO", tmp_path / "cpuinfo")
    assert compiled.load(source, "-DANSWER=1").answer() == 2
    assert len(list((tmp_path / "cache" / "ruvon").iterdir())) == 4


def test_no_compiler(source, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert compiled.load(source) is None
    assert compiled.why_not(source) == "there is no C compiler: neither cc nor gcc nor clang"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("/nowhere/gcc -m64", "/nowhere/gcc"),
        ("false", "false"),
        ("'unclosed", 'CC="\'unclosed"'),
        ("/", "denied"),
    ],
)
def test_a_compiler_that_is_none_is_named(source, monkeypatch, command, says):
    monkeypatch.setenv("CC", command)
    assert compiled.load(source) is None
    assert says in compiled.why_not(source)


def compiler_that(tmp_path, monkeypatch, *does):
    """A `CC` of these lines of shell, which is told -o as the last but one."""
    path = tmp_path / "other compiler"
    path.write_text("\n".join(["#!/bin/sh", "for out; do :; done", *does]) + "\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", f"'{path}'")
    return path


@pytest.mark.parametrize("does", ["echo garbage > $out", "echo garbage", ": > $out"])
def test_a_compiler_that_makes_something_else_is_named_and_nothing_is_kept(
    source, tmp_path, monkeypatch, does
):
    path = compiler_that(tmp_path, monkeypatch, does)
    assert compiled.load(source) is None
    assert f"what {path} made cannot be loaded" in compiled.why_not(source)
    assert list((tmp_path / "cache" / "ruvon").iterdir()) == []


def test_a_compiler_that_says_nothing_is_named_and_is_not_asked_in_another_language(
    source, tmp_path, monkeypatch
):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    path = compiler_that(tmp_path, monkeypatch, "test $LC_ALL = C && exit 3")
    assert compiled.load(source) is None
    assert compiled.why_not(source) == f"{path} exited with 3"


@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[:100], lambda whole: whole[:-1]])
def test_what_is_damaged_is_made_anew(source, tmp_path, damage):
    assert compiled.load(source, "-DANSWER=6").answer() == 6
    (kept,) = (tmp_path / "cache" / "ruvon").iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # what this process has loaded stays as it is
    kept.write_bytes(damage(whole))
    again()
    assert compiled.load(source, "-DANSWER=6").answer() == 6
    assert kept.read_bytes() == whole


@pytest.mark.usefixtures("has_compiler")
def test_a_relative_cache_is_none(source, tmp_path, monkeypatch):
    """Its specification has it ignored; the working directory may be anybody's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert compiled.load(source, "-DANSWER=7").answer() == 7
    assert not (tmp_path / "cache").exists()
    assert len(list((tmp_path / "home" / ".cache" / "ruvon").iterdir())) == 1


@pytest.mark.usefixtures("has_compiler")
def test_what_another_user_owns_is_not_used(source, tmp_path, monkeypatch):
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert compiled.load(source, "-DANSWER=8").answer() == 8
    assert list((tmp_path / "cache" / "ruvon").iterdir()) == []


@pytest.mark.usefixtures("has_compiler")
def test_where_nothing_may_be_written_it_is_kept_by_this_process_alone(source, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert compiled._folder() != tmp_path / "cache" / "ruvon"


def test_the_cache_is_closed_to_others_whatever_the_umask(source, tmp_path):
    before = os.umask(0)
    try:
        assert compiled._folder() == tmp_path / "cache" / "ruvon"
    finally:
        os.umask(before)
    assert compiled._folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["cc", "gcc", "clang"])
def test_any_of_three_compilers_is_found(source, tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled.compiler() == [name]


@pytest.mark.usefixtures("has_compiler")
def test_where_users_have_no_numbers_it_is_kept_by_this_process_alone(source, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "getuid")
    assert compiled.load(source, "-DANSWER=9").answer() == 9
    assert list((tmp_path / "cache" / "ruvon").iterdir()) == []


@pytest.mark.usefixtures("has_compiler")
def test_a_folder_of_this_process_alone_ends_with_it(source, tmp_path):
    code = f"""
        from pathlib import Path
        from engine.machine import compiled
        compiled.FLAGS = {compiled.FLAGS}
        print(compiled.load(Path({str(source)!r}), "-DANSWER=10").answer(), compiled._folder())
    """
    (tmp_path / "file").write_text("no folder")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    answer, folder = said.split(maxsplit=1)
    assert answer == "10"
    assert "ruvon-" in folder
    assert not os.path.exists(folder.strip())


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
    monkeypatch.setattr(compiled, "COMPILER_TIMEOUT", 0.2)
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
        from engine.machine import compiled
        compiled.FLAGS = {compiled.FLAGS}
        print(compiled.load(Path({str(source)!r}), "-DANSWER=5").answer())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    many = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert [one.communicate(timeout=600)[0] for one in many] == ["5\n"] * 6
    assert len(list((tmp_path / "cache" / "ruvon").iterdir())) == 1
