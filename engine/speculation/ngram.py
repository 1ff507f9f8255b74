"""Drafts from the request's own text: the tokens that followed an earlier occurrence of its end. Part 16.

Runs no model, and knows tokens only. Drafts are good where answers repeat their prompt: code, summaries,
tables.
Source: prompt lookup decoding, A. Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding
"""

from collections.abc import Sequence

import numpy as np


def lookup(token_ids: Sequence[int], max_tokens: int, max_n: int = 4, min_n: int = 2) -> list[int]:
    """Find an earlier occurrence of the end of a text, and return at most `max_tokens` tokens that followed.

    An occurrence of the text's last n tokens is looked for with n = `max_n` first, then with smaller n down
    to `min_n`, which is at least 1. The first n with an occurrence counts, and of its occurrences the latest.
    An occurrence may overlap the end of the text, but is not the end itself. Fewer tokens are returned if the
    text ends before, and none if there is no occurrence.
    """
    text = np.array(token_ids, np.int64)
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)  # [len-n, n], each has a successor
        matches = np.flatnonzero((windows == text[-n:]).all(1))
        if len(matches):
            successor = int(matches[-1]) + n
            return text[successor : successor + max_tokens].tolist()
    return []
