"""Keeps the conversation of ``start_chat``, one turn at a time, in text or in token ids."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from staticllm.errors import GenerationConfigError, PromptError, SnapshotError, StaticLLMError

from .text.chat_prompt import Prompt, encode_messages
from .text.output_processor import RequestOutput
from .text.tokenizer_tools import TokenizerTools


class ChatSession:
    """The turns so far. As in GenAI, a chat keeps the form of its first turn, and token ids get no chat template.

    Any thread may call the methods; turns of several threads run one after the other. ``is_open``: whether a chat was started and
    has not ended.
    """

    def __init__(self, tools: TokenizerTools) -> None:
        self._tools = tools
        self._messages: list[dict[str, str]] = []
        self._tokens: list[int] = []
        self.is_open = False
        self._lock = threading.Lock()
        self._owner = 0

    def start(self, system_message: str = "") -> None:
        """Begin a new conversation. The system message is used only in a chat in text.

        Raises:
            PromptError: the system message is no str.
        """
        if not isinstance(system_message, str):
            raise PromptError(f"the system message is a {type(system_message).__name__}: must be a str")
        with self.exclusive():
            self._forget()
            self._messages = [{"role": "system", "content": system_message}] if system_message else []
            self.is_open = True

    def finish(self) -> None:
        with self.exclusive():
            self._forget()
            self.is_open = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the chat for one turn. Other threads wait; this thread, inside its streamer, cannot, and gets an error.

        Raises:
            StaticLLMError: a turn is already running in this thread.
        """
        if self._owner == threading.get_ident():
            raise StaticLLMError("a turn of the chat is running in this thread: its streamer cannot begin another")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = 0

    def prompt_of(self, turn: str | Prompt) -> Prompt:
        """Return the prompt of the conversation with one more turn: a message of the user, or tokens.

        Raises:
            GenerationConfigError: the chat has the other form.
            PromptError: the chat template refuses the conversation.
        """
        if isinstance(turn, str):
            if self._tokens:
                raise GenerationConfigError(
                    "this chat goes on in token ids: pass token ids, or finish_chat before a str"
                )
            return self._encoded([*self._messages, {"role": "user", "content": turn}])
        if any(message["role"] == "user" for message in self._messages):
            raise GenerationConfigError("this chat goes on in text: pass a str, or finish_chat before token ids")
        return Prompt([*self._tokens, *turn.ids])

    def add(self, turn: str | Prompt, prompt: Prompt, output: RequestOutput) -> None:
        """Add a turn and its answer. Tokens are kept with the one that ended the answer, as in GenAI."""
        if isinstance(turn, str):
            said = [{"role": "user", "content": turn}, {"role": "assistant", "content": output.text}]
            self._messages = [*self._messages, *said]
        else:
            self._tokens = [*prompt.ids, *output.tokens]

    def ids(self) -> list[int]:
        """Return the conversation as token ids.

        Raises:
            SnapshotError: there is no conversation.
        """
        if self._tokens:
            return list(self._tokens)
        if not self._messages:
            raise SnapshotError("there is no conversation: start_chat and generate first, or pass a prompt")
        return self._encoded(self._messages).ids

    def _encoded(self, messages: list[dict[str, str]]) -> Prompt:
        return encode_messages(self._tools.tokenizer, self._tools.conversations, messages)

    def _forget(self) -> None:
        self._messages = []
        self._tokens = []
