"""What an article prints of a file is in that file, line by line."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# article, which of its blocks of Python, and the file that it is printed from
PRINTED = [
    ("13_triton_decode_kernel", 1, "benchmarks/part13_steps.py"),
    ("13_triton_decode_kernel", 2, "benchmarks/part13_steps.py"),
    ("13_triton_decode_kernel", 3, "engine/kernels/paged_attention.py"),
]


def code(line: str) -> str:
    """The line without its indentation and its comment."""
    return line.partition("  # ")[0].strip()


@pytest.mark.parametrize(("article", "number", "source"), PRINTED)
def test_printed_code_is_the_files(article, number, source):
    text = (ROOT / "articles" / f"{article}.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    lines = [code(line) for line in block.splitlines() if not line.strip().startswith("#")]
    known = set(map(code, (ROOT / source).read_text(encoding="utf-8").splitlines()))
    assert lines
    missing = [line for line in lines if line not in known]
    assert not missing, f"{source} no longer has {missing}, which {article}.md prints"
