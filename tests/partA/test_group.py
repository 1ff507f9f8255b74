"""Two ranks meet: this process, and another one that says what it has been given."""

import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.parallel import group as group_module
from engine.parallel.group import Group
from tests.system.ready import Popen

CPU = torch.device("cpu")
OTHER = """
import json, sys, torch
from engine.parallel.group import Group
from tests.partA.test_group import listens_on
group = Group(1, 2, sys.argv[1], torch.device("cpu"), "gloo")
own = torch.tensor([4.0, -2.0])
given = [group.all_reduce_sum(own.clone()), group.all_reduce_max(own), group.broadcast(own.clone())]
given.append(torch.tensor(group.all_reduce_min(3)))
print(json.dumps([[x.tolist() for x in given], listens_on()]), flush=True)
group.close()
"""


def listens_on() -> list[str]:
    """The addresses on which this process accepts connections: hexadecimal, as /proc has them."""
    names = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mine = {found[1] for name in names if (found := re.fullmatch(r"socket:\[(\d+)\]", name))}
    rows = [line.split() for kind in ("tcp", "tcp6") for line in _lines(f"/proc/self/net/{kind}")]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in mine]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()[1:] if Path(path).exists() else []


@pytest.fixture
def alone(tmp_path):
    """A group of one rank: this process."""
    group = Group(0, 1, str(tmp_path / "alone"), CPU, "gloo")
    yield group
    group.close()


def test_what_two_ranks_give_and_get(tmp_path, monkeypatch):
    """In the order in which both call: sum, maximum, rank 0's, minimum. They listen on the loopback alone,
    also where the machine's owner has named another interface, for other programs.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    store = str(tmp_path / "ranks")
    listening, variables = listens_on(), dict(os.environ)
    with Popen([sys.executable, "-c", OTHER, store], stdout=-1, text=True) as other:
        group = Group(0, 2, store, CPU, "gloo")
        own = torch.tensor([1.0, 5.0])
        summed = own.clone()
        assert group.all_reduce_sum(summed) is summed, "in place"
        mine = [
            summed,
            group.all_reduce_max(own),
            group.broadcast(own.clone()),
            torch.tensor(group.all_reduce_min(7)),
        ]
        opened = listens_on()[len(listening) :]
        group.close()
        theirs, opened_there = json.loads(other.communicate()[0])
    assert [x.tolist() for x in mine] == [[5, 3], [4, 5], [1, 5], 3]
    assert theirs == [[5, 3], [4, 5], [1, 5], 3], "every rank has the same"
    assert own.tolist() == [1, 5], "a maximum is a new tensor"
    assert opened, "gloo listens"
    assert set(opened + opened_there) == {"0100007F"}, "on 127.0.0.1 alone, backwards"
    assert dict(os.environ) == variables, "what chose the interface is as before"


def test_a_second_group_is_refused_and_the_first_goes_on(alone, tmp_path):
    with pytest.raises(RuntimeError, match="in use in this process, by another engine"):
        Group(0, 1, str(tmp_path / "second"), CPU, "gloo")
    assert alone.all_reduce_sum(torch.ones(1)).item() == 1


def test_a_rank_that_does_not_join_in_time_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(group_module, "START_SECONDS", 1)
    with pytest.raises(RuntimeError):
        Group(0, 2, str(tmp_path / "ranks"), CPU, "gloo")
    assert not dist.is_initialized(), "a later group finds the process as it was"


def test_leaving_does_not_wait_for_ever(alone, monkeypatch):
    """NCCL would, for a sum whose other rank is gone."""
    left, began = threading.Event(), threading.Event()
    destroy = dist.destroy_process_group

    def hang() -> None:
        began.set()
        left.wait(100)
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", hang)
    monkeypatch.setattr(group_module, "CLOSE_SECONDS", 0.1)
    begin = time.monotonic()
    alone.close()
    assert began.is_set(), "the group is left"
    assert time.monotonic() - begin < 60
    left.set()
    end = time.monotonic() + 60
    while dist.is_initialized() and time.monotonic() < end:
        time.sleep(0.01)
    assert not dist.is_initialized()


def test_who_has_left_already_ends_no_other_group(alone, tmp_path):
    alone.close()
    later = Group(0, 1, str(tmp_path / "later"), CPU, "gloo")
    try:
        alone.close()
        assert later.all_reduce_sum(torch.ones(1)).item() == 1
    finally:
        later.close()
