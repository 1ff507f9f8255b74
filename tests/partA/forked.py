"""Ranks whose processes fork from one that has torch, as in tests/system/ready.py: 3 s less for each."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from engine.parallel import launch
from tests.system.ready import Popen


@contextmanager
def forking(kind: type[Popen]) -> Iterator[None]:
    """Inside, ranks start as processes of this kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": kind}))
        yield
