"""Where the text of a window ends before the model ends it: at a stop string, as in GenAI's pipeline for speech.

Text generation cuts its answers within a token. Segments and words are made of whole tokens, so this rule is GenAI's own: it
looks at the last tokens only, as many as the longest stop string has, and keeps those that have a part of the text before the
stop string. (GenAI does not look at the last token that ``max_new_tokens`` allows.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class StopStrings:
    """Finds the first stop string of a window's tokens. ``num_held``: the most tokens that it cuts off; 0 if there are none."""

    def __init__(
        self,
        strings: Collection[str],
        has_stop: bool,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[list[int]], str],
    ) -> None:
        """``has_stop``: whether the text keeps the stop string. ``encode`` adds no special tokens, ``decode`` leaves them out."""
        self._strings = sorted(strings, key=str.encode)
        self._has_stop = has_stop
        self._decode = decode
        self.num_held = max((len(encode(string)) for string in strings), default=0)

    def num_cut(self, tokens: Sequence[int]) -> int | None:
        """Return how many tokens at the end are cut off, now that the last one was chosen; None if no stop string is there."""
        if not self.num_held or len(tokens) < self.num_held:
            return None
        last = list(tokens[-self.num_held :])
        text = self._decode(last)
        for string in self._strings:
            place = text.find(string)
            if place >= 0:
                return self._num_after(last, text[: place + (len(string) if self._has_stop else 0)].rstrip(" \n"))
        return None

    def _num_after(self, last: list[int], kept: str) -> int:
        """Return how many of the last tokens follow those that have the text ``kept``."""
        if not kept:
            return len(last)
        counts = range(1, len(last) + 1)
        return next((len(last) - count for count in counts if kept in self._decode(last[:count])), 0)
