"""Turns tokens into text one by one, without half characters and without parts of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[list[int]], str]
CONTEXT = 8
WINDOW = 32  # tokens decoded again with each new token: enough for any merge, few enough to be cheap
INCOMPLETE = "\ufffd"
MAX_UNFINISHED = (
    3  # a UTF-8 character has at most four bytes: more than three undecodable ones never become a character
)


class IncrementalDetokenizer:
    """Decodes one answer incrementally.

    Text is held back while its last character is incomplete, and while it may be the beginning of a stop string. Stop strings
    count only after the texts ``lead``, which come one after the other, with other text between them. Of several that one token
    completes, the first in alphabetical order cuts the text, as in GenAI.
    """

    def __init__(
        self, decode: Decode, stop_strings: Collection[str] = (), include_stop: bool = False, lead: Sequence[str] = ()
    ) -> None:
        self._decode = decode
        self._stops = sorted(stop_strings)
        self._include_stop = include_stop
        self._lead = [*lead]
        self._lead_end = 0
        self._window: list[int] = []
        self._window_text = 0  # characters of the window's text that are in ``text``
        self._sent = 0
        self._is_unfinished = False
        self.text = ""
        self.stop_string: str | None = None
        """The stop string that has ended the text."""

    def push(self, token: int) -> str:
        """Add a token and return the text that may be shown now."""
        self._window.append(token)
        decoded = self._decode(self._window)
        unfinished = len(decoded) - len(decoded.rstrip(INCOMPLETE))
        self._is_unfinished = unfinished > 0
        return self._extend(decoded[: len(decoded) - min(unfinished, MAX_UNFINISHED)])

    def finish(self) -> str:
        """Return the text that is still held back; to be called after the last token."""
        if self.is_stopped:
            return ""
        if self._window:
            self._add(self._decode(self._window)[self._window_text :])
        return self._send(len(self.text))

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop_string is not None

    @property
    def is_holding(self) -> bool:
        """Whether text is held back because it may begin a stop string, also a character that is not complete yet."""
        return self._sent < len(self.text) or (self._is_unfinished and bool(self._stops) and not self.is_stopped)

    def _extend(self, decoded: str) -> str:
        self._add(decoded[self._window_text :])
        self._window_text = max(self._window_text, len(decoded))
        if len(self._window) > WINDOW:
            self._shorten_window()
        return self._send(len(self.text) if self.is_stopped else len(self.text) - self._held())

    def _shorten_window(self) -> None:
        """Drop all but the last ``CONTEXT`` tokens, if the unread text is the same with and without the others."""
        unread = self._decode(self._window)[self._window_text :]
        shorter = self._decode(self._window[-CONTEXT:])
        if shorter.endswith(unread):
            self._window = self._window[-CONTEXT:]
            self._window_text = len(shorter) - len(unread)

    def _add(self, text: str) -> None:
        longest = max(map(len, (*self._stops, *self._lead)), default=0)
        search_from = max(self._lead_end, len(self.text) - longest + 1)
        self.text += text
        while self._lead:
            place = self.text.find(self._lead[0], search_from)
            if place < 0:
                return
            search_from = place + len(self._lead.pop(0))
            self._lead_end = search_from
        found = [(stop, place) for stop in self._stops if (place := self.text.find(stop, search_from)) >= 0]
        if found:
            stop, place = found[0]  # as in GenAI, of several that a token completes the first in alphabetical order
            self.text = self.text[: place + (len(stop) if self._include_stop else 0)]
            self.stop_string = stop

    def _held(self) -> int:
        """Return the number of unsent characters at the end that may begin a stop string."""
        longest = 0 if self._lead else min(max(map(len, self._stops), default=1) - 1, len(self.text) - self._lead_end)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops if len(stop) > length):
                return min(length, len(self.text) - self._sent)
        return 0

    def _send(self, until: int) -> str:
        text = self.text[self._sent : until]
        self._sent = max(self._sent, until)
        return text
