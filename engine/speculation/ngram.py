"""Drafts from the request's own text: what followed the last time these words stood there. Part 16.

Runs no model. Good where answers repeat their prompt: code, summaries, tables. Knows tokens only.
Source: prompt lookup decoding, A. Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding
"""

from collections.abc import Sequence

import numpy as np


def lookup(token_ids: Sequence[int], max_tokens: int, max_n: int = 4, min_n: int = 2) -> list[int]:
    """At most `max_tokens` tokens that followed the latest earlier match of the text's last n tokens, for the
    largest n from `max_n` down to `min_n` that has one; none if there is none. A match may overlap the end of
    the text, but is not the end itself; what followed it ends where the text does.
    """
    text = np.array(token_ids, np.int64)
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)  # [len-n, n], each has a successor
        matches = np.flatnonzero((windows == text[-n:]).all(1))
        if len(matches):
            successor = int(matches[-1]) + n
            return text[successor : successor + max_tokens].tolist()
    return []
