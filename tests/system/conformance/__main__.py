"""Ask a server, and compare or record.

    python -m tests.system.conformance compare http://127.0.0.1:8000              # what is not accepted
    python -m tests.system.conformance compare http://127.0.0.1:8000 --all        # all that differs
    python -m tests.system.conformance record http://127.0.0.1:9000 recorded.json # from a real vLLM
    python -m tests.system.conformance page   # writes articles/differs_from_vllm.md

The model is storyteller in float32 with a context of 512 tokens. To record, in an environment of its own:

    vllm serve engine/zoo/storyteller --served-model-name storyteller --dtype float32 --max-model-len 512
"""

import json
from pathlib import Path
from typing import Annotated

import httpx
import typer

from tests.system.conformance.accepted import PAGE, page, read, unexpected
from tests.system.conformance.cases import CASES
from tests.system.conformance.differences import ask, differences

RECORDED = Path(__file__).with_name("recorded.json")
app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def compare(address: str, all: Annotated[bool, typer.Option("--all")] = False, only: str = "") -> None:
    """Print what differs from vLLM's recorded answers; exit with 1 if it is not all accepted."""
    recorded = json.loads(RECORDED.read_text())
    accepted = [] if all else read()
    same = total = 0
    cases = [case for case in CASES if only in case.name]
    with httpx.Client(base_url=address, timeout=120, trust_env=False) as client:
        for case in cases:
            answer = ask(client, case)
            found = unexpected(differences(case, recorded[case.name], answer), accepted)
            total, same = total + len(found), same + (not found)
            if found:
                print(f"\n== {case.name}  [{case.use}]")
            for one in found:
                print(f"   {one.what:12} {one.where}\n      vLLM: {one.vllm}\n      ours: {one.ours}")
    print(f"\n{same} of {len(cases)} cases as vLLM; {total} deviations")
    raise typer.Exit(total > 0)


@app.command()
def record(address: str, file: Path) -> None:
    """Write a server's answers, one line a case."""
    with httpx.Client(base_url=address, timeout=120, trust_env=False) as client:
        lines = [
            f"{json.dumps(case.name)}: {json.dumps(ask(client, case), ensure_ascii=False)}" for case in CASES
        ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@app.command("page")
def write_page() -> None:
    """Write "What differs from vLLM"."""
    PAGE.write_text(page(read(), len(CASES)))


if __name__ == "__main__":
    app()
