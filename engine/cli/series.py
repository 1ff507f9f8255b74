"""`ruvon parts …`: hands over to the checkout's own tool. Part 20's wiring."""

import subprocess
import sys
from pathlib import Path

from engine.cli.process import environment

CHECKOUT = Path(__file__).parents[2]


def run(arguments: list[str]) -> int:
    """Run `python -m parts …` where the parts are; the exit status is the tool's."""
    if not (CHECKOUT / "parts" / "__main__.py").exists():
        print(
            "ruvon parts: the parts (articles, notebooks, demos, tests) are not in the installed package. "
            "Clone the repository, run `pip install -e .` in it, and call this there.",
            file=sys.stderr,
        )
        return 2
    return subprocess.run([sys.executable, "-m", "parts", *arguments], env=environment()).returncode
