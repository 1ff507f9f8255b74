"""Which row of a step speaks of which token, for requests that have their prompts scored. Part 10."""

from engine.requests.request import Request
from engine.scheduling.batching import Spoken, next_tokens


def spoken_of(request: Request, positions: range) -> Spoken:
    """What the rows of logits at these positions of the request's tokens speak of: a scheduler's `spoken_of`.

    A row speaks of the token that comes after its own. If that is a token of the prompt, and the request
    wants every row, it is to be scored. If nobody knows it yet, it is to be chosen: so after the last of
    `request.token_ids`, and after each draft behind that one. Between the two, a request that was preempted
    has rows that speak of its own output so far; these are of no use. For who does not want every row
    (`request.wants_every_row`), there are none but those to choose from: `next_tokens`.
    """
    if not request.wants_every_row:
        return next_tokens(request, positions)
    prompt_ids = request.token_ids[positions.start + 1 : min(positions.stop + 1, request.num_prompt_tokens)]
    last_known = len(request.token_ids) - 1
    return Spoken(prompt_ids, max(0, positions.stop - max(positions.start, last_known)))
