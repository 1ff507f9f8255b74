"""While a model is loaded, whoever sits at a terminal reads so."""

import io
import os
import pty
import sys

import pytest

from engine.cli.loading import loading


def test_it_is_said_at_a_terminal(monkeypatch):
    reads, writes = pty.openpty()
    with os.fdopen(writes, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with loading("[red]mine"):
            pass
        terminal.flush()
        said = os.read(reads, 4096).decode()
    os.close(reads)
    assert "Loading [red]mine" in said
    assert "0:00:00" in said, "for how long"


def test_elsewhere_nothing_is_said_and_errors_go_on(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(ValueError, match="no such model"), loading("mine"):
        raise ValueError("no such model")
    assert sys.stderr.getvalue() == ""
