"""The progress bar of `LLM`, with the number of finished prompts and tokens per second. Part 20."""

import time
from collections.abc import Callable
from functools import partial

from tqdm import tqdm

from engine.decoding.outputs import RequestOutput

UseTqdm = bool | Callable[..., tqdm]  # whether there is a bar, or a function that makes one
REFRESH_SECONDS = 0.1  # between two drawings of the speed, because a step may be much shorter


class Progress:
    """Counts the tokens of outputs as they come, and shows them in a bar."""

    def __init__(self, total: int, use_tqdm: UseTqdm = True) -> None:
        """`total` is the number of prompts. With `use_tqdm=True` there is a bar if stderr is a terminal, with
        False there is none. A function, such as `partial(tqdm, leave=False)`, makes the bar. It is called
        with `total`, `desc`, `dynamic_ncols` and `unit`, which override its own.
        """
        make_bar: Callable[..., tqdm]
        if callable(use_tqdm):
            make_bar = use_tqdm
        else:  # with disable=None, tqdm shows a bar only on a terminal
            make_bar = partial(tqdm, disable=None if use_tqdm else True)
        self.bar = make_bar(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
        self.num_input_tokens = 0
        self.num_output_tokens = 0
        self._counted: dict[str, int] = {}  # by request id: the output tokens that are counted already
        self._start = self._refreshed = time.perf_counter()

    def count(self, output: RequestOutput) -> None:
        """Count the output's new tokens, and its prompt if it is finished. An output holds all tokens of
        its request so far. Does nothing without a bar.
        """
        if self.bar.disable:
            return
        num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
        if output.request_id not in self._counted:
            self.num_input_tokens += len(output.prompt_token_ids)
        self.num_output_tokens += num_tokens - self._counted.get(output.request_id, 0)
        self._counted[output.request_id] = num_tokens

        now = time.perf_counter()
        if output.finished or now - self._refreshed > REFRESH_SECONDS:
            self._refreshed = now
            seconds = now - self._start
            input_speed, output_speed = self.num_input_tokens / seconds, self.num_output_tokens / seconds
            speed = f"input: {input_speed:,.0f} tokens/s, output: {output_speed:,.0f} tokens/s"
            # For a finished prompt the drawing is left to `update`, which has the new number of prompts.
            self.bar.set_postfix_str(speed, refresh=not output.finished)
        if output.finished:
            self.bar.update(1)

    def close(self) -> None:
        """End the bar. Its last state stays in the terminal, unless the bar was made with `leave=False`."""
        self.bar.close()
