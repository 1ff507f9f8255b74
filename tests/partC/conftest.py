"""Engines that are made without measuring."""

from tests.part03.linears import packing_asks_no_stopwatch  # noqa: F401
