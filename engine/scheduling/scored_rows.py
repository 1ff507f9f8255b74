"""Chooses the rows of a step's logits that are read, for requests whose prompts are scored. Part 10."""

from engine.requests.request import Request
from engine.scheduling.batching import LogitsRows, sampled_rows


def scored_rows(request: Request, positions: range) -> LogitsRows:
    """The rows whose logits are read, for a request whose new tokens are at `positions`. For a scheduler's
    `select_rows`.

    The row at position p has the logits of the token at p + 1. Three kinds:

    - p + 1 is a token of the prompt, one of the first `request.num_prompt_tokens` of `request.token_ids`: the
      row is scored for it, if the request wants every row (`request.wants_every_row`).
    - p + 1 is a token of the output so far, which a preempted request computes again: the row is not read.
    - p is the last of `request.token_ids`, or a draft behind it: a token is chosen from the row
      (`sampled_rows` counts these).
    """
    rows = sampled_rows(request, positions)
    if not request.wants_every_row:
        return rows
    prompt_ids = request.token_ids[positions.start + 1 : min(positions.stop + 1, request.num_prompt_tokens)]
    return rows._replace(prompt_ids=prompt_ids)
