"""While a model is loaded, whoever sits at a terminal reads so."""

import io
import re
import sys

import pytest

from engine.wiring.loading import loading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_is_said_at_a_terminal(monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with loading("[red]mine"):
        pass
    said = sys.stderr.getvalue()
    assert "Loading [red]mine" in said
    assert re.search(r"\d:\d\d:\d\d", said), "for how long"


def test_elsewhere_nothing_is_said_and_errors_go_on(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(ValueError, match="no such model"), loading("mine"):
        raise ValueError("no such model")
    assert sys.stderr.getvalue() == ""
