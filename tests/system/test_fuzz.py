"""Schemathesis against `ruvon serve`: requests made from /openapi.json, right and wrong ones, by thousands.

It judges that no answer is a 500, that none is late, that each has a status, a content type, headers and a
body that /openapi.json describes, and that what the description forbids is refused. Its settings are in
fuzz/schemathesis.toml.
"""

import json
import subprocess
import sys
from pathlib import Path

from engine.demo.server import served

FUZZ = Path(__file__).parent / "fuzz"
DEADLINE = 240.0  # seconds after which it will never end: not a promise about speed


def test_nothing_outside_the_published_schema_comes_back(tmp_path):
    log, report = tmp_path / "server.log", tmp_path / "report.json"
    with served(log, "--model", "storyteller-draft", "--max-model-len", "32") as (url, _):
        run = subprocess.run(
            [
                sys.executable, "-m", "schemathesis.cli", "--config-file", FUZZ / "schemathesis.toml", "run",
                f"{url}/openapi.json", "--no-color", "--report-json-path", report,
            ],
            cwd=FUZZ, capture_output=True, text=True, timeout=DEADLINE,
        )  # fmt: skip
    print(run.stdout[-4000:])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "Traceback" not in log.read_text()
    cases = json.loads(report.read_text())["test_cases"]
    print(cases)
    assert cases["generated"] > 500, "nearly nothing was tried"
