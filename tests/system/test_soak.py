"""benchmarks/soak.py in its short form: the same visits, drawn from a fixed seed, and nothing is left."""

import asyncio

from benchmarks.soak import soak
from engine.demo.server import served

CLIENTS, VISITS, SEED = 12, 15, 15


def test_a_server_after_a_soak_is_what_it_was_before(tmp_path):
    """Clients that leave, send half a request or nonsense, between clients that want their own text."""
    log = tmp_path / "server.log"
    with served(log, "--model", "storyteller") as (url, pid):
        found = asyncio.run(soak(url, pid, CLIENTS, SEED, visits=VISITS))
    print(f"before {found.before}\nafter  {found.after}\n{dict(found.clients.done)}")
    assert found.complaints == []
    assert "Traceback" not in log.read_text()
    done = found.clients.done
    assert done["leave", "left"] + done["half", "left"] > CLIENTS, "too few have left"
    assert sum(times for (_, ended), times in done.items() if ended == "ok") > CLIENTS * VISITS / 3
