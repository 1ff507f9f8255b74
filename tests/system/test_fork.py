"""An engine in a process that was forked from the one that made it: PyTorch and our C wait there for threads
that did not come along. So it says what to do instead, and computes once it is done.
"""

import os
import subprocess
import sys

import pytest

MAIN = """
import os
import traceback
import torch
from engine import LLM, SamplingParams

torch.set_num_threads(2)
llm = LLM("storyteller")
PROMPTS = ["Once upon a time", "The little dog", "A red ball"]  # more than one: pages are read in C


def told() -> list[str]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


before = told()
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert told() == before, "the parent notices nothing"
else:
    try:
        try:
            told()
        except RuntimeError as error:
            assert "spawn" in str(error), error
        else:
            raise AssertionError("it computed, with threads that are not here")
        torch.set_num_threads(1)
        assert told() == before
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_an_engine_in_a_forked_process_says_what_to_do_instead_of_hanging():
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", MAIN], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
