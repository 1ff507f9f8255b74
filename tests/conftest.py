"""Shared by every part's tests:

fixed thread count, the embedded model, and tiny random models made by Hugging Face.
"""

import inspect
import os
import sys
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may need a download
# Where one of these is set, typer and rich would colour what a test reads.
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("GITHUB_ACTIONS", None)
os.environ.pop("PY_COLORS", None)

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter, which must be asked for before anybody imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)  # results must not depend on the machine's cores
# The same examples on every machine, however slow it is, and nothing kept between runs.
settings.register_profile("ruvon", derandomize=True, deadline=None, database=None)
settings.load_profile("ruvon")


@pytest.fixture(scope="session", autouse=True)
def remembering_interpreter() -> None:
    """Triton's interpreter searches its whole language for what to replace, each time that a kernel calls a
    function. The names that it finds are always the same: searched for once, they cost a fifth less time.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    is_builtin, patch = interpreter.tl.core.is_builtin, interpreter._patch_attr

    @cache
    def names(package) -> list[str]:
        return [name for name, _ in inspect.getmembers(package, is_builtin)]

    def patch_builtin(package, *rest) -> None:
        for name in names(package):
            if is_builtin(member := getattr(package, name)):  # not replaced already
                patch(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtin


DATA = Path(os.environ.get("RUVON_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of corpora and GPT-2's vocabulary, which is not part of the repository (RUVON_DATA names
    it).
    """
    if not DATA.is_dir():
        assert not os.environ.get("RUVON_REQUIRE_DATA"), f"no data folder at {DATA}"
        pytest.skip(f"needs the data folder, not at {DATA}; set RUVON_DATA")
    return DATA


@pytest.fixture(scope="session")
def checkpoint() -> str:
    """The trained model the equality tests run on: embedded, or a real one where the hub can be reached."""
    return os.environ.get("RUVON_TEST_MODEL", "storyteller")


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory) -> Path:
    """A folder with a random GPT-2 of 2 layers, saved by Hugging Face, and the embedded model's tokenizer."""
    import shutil

    from transformers import GPT2Config, GPT2LMHeadModel

    from engine.models.checkpoint import ZOO

    folder = tmp_path_factory.mktemp("tiny_gpt2")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=4096, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ZOO / "storyteller" / name, folder)
    return folder


@pytest.fixture(scope="session")
def trained(checkpoint):
    """(our model, our tokenizer, Hugging Face's model) of the trained checkpoint, all in fp32 on the CPU."""
    from engine.models.loader import load_model
    from engine.text.tokenizer import Tokenizer
    from tests.part01 import reference

    return load_model(checkpoint), Tokenizer.from_pretrained(checkpoint), reference.load(checkpoint)
