"""The trained model. Without a GPU, Triton's kernels run in its interpreter (tests/conftest.py)."""

from tests.part04.conftest import model, tokenizer  # noqa: F401
