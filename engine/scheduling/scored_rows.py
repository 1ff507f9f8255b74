"""Which rows of a step's logits are read where requests have their prompts scored. Part 10."""

from engine.requests.request import Request
from engine.scheduling.batching import LogitsRows, sampled_rows


def scored_rows(request: Request, positions: range) -> LogitsRows:
    """The rows that are read of a request whose new tokens are at these positions: a scheduler's
    `select_rows`.

    The row at position p has the logits of the token at p + 1. If that is a token of the prompt, and the
    request wants every row (`request.wants_every_row`), the row is scored for it. If it is not known yet, it
    is chosen from the row: so at the last of `request.token_ids`, and at each draft behind it; `sampled_rows`
    counts these. Between the two, a request that was preempted has rows for its own output so far, which
    nobody reads. Of a request that does not want every row, none is scored.
    """
    rows = sampled_rows(request, positions)
    if not request.wants_every_row:
        return rows
    prompt_ids = request.token_ids[positions.start + 1 : min(positions.stop + 1, request.num_prompt_tokens)]
    return rows._replace(prompt_ids=prompt_ids)
