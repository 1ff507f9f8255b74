"""`python -m parts`."""

from parts.cli import app

app(prog_name="python -m parts")
