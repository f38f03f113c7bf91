"""The conversation of ``start_chat``: one turn at a time, in text or in token ids."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import openvino_genai as genai

from staticllm.errors import GenerationConfigError, SnapshotError, StaticLLMError
from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.pipelines.text.tokenization import Form, Prompt, encode_messages


class ChatSession:
    """The turns so far. As in GenAI, a chat stays in the form of its first turn, and token ids have no chat template.

    Any thread may call; turns of several threads run one after the other.
    """

    def __init__(self, tokenizer: genai.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        self._tokens: list[int] = []
        self._is_open = False
        self._lock, self._owner = threading.Lock(), 0

    def start(self, system_message: str = "") -> None:
        """Begin a new conversation. The system message takes part in a chat in text."""
        with self.exclusive():
            self._forget()
            self._messages = [{"role": "system", "content": system_message}] if system_message else []
            self._is_open = True

    def finish(self) -> None:
        with self.exclusive():
            self._forget()
            self._is_open = False

    def takes(self, form: Form) -> bool:
        """Whether inputs of this form are a turn of the chat: all but a history, which brings its own conversation."""
        return self._is_open and form != "history"

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One turn at a time. Other threads wait; the same thread, from its streamer, would wait for itself.

        Raises:
            StaticLLMError: a turn runs in this thread.
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
        """The conversation with one more turn: a message of the user, or tokens.

        Raises:
            GenerationConfigError: the chat goes on in the other form.
            PromptError: the chat template refuses it.
        """
        if isinstance(turn, str):
            if self._tokens:
                raise GenerationConfigError(
                    "this chat goes on in token ids: pass token ids, or finish_chat before a str"
                )
            return encode_messages(self._tokenizer, [*self._messages, {"role": "user", "content": turn}])
        if any(message["role"] == "user" for message in self._messages):
            raise GenerationConfigError("this chat goes on in text: pass a str, or finish_chat before token ids")
        return Prompt([*self._tokens, *turn.ids])

    def add(self, turn: str | Prompt, prompt: Prompt, output: RequestOutput) -> None:
        """Keep a turn. Of tokens all, with the one that ended the answer, as GenAI keeps them."""
        if isinstance(turn, str):
            said = [{"role": "user", "content": turn}, {"role": "assistant", "content": output.text}]
            self._messages = [*self._messages, *said]
        else:
            self._tokens = [*prompt.ids, *output.tokens]

    def ids(self) -> list[int]:
        """The conversation as token ids.

        Raises:
            SnapshotError: there is none.
        """
        if self._tokens:
            return list(self._tokens)
        if not self._messages:
            raise SnapshotError("there is no conversation: start_chat and generate first, or pass a prompt")
        return encode_messages(self._tokenizer, self._messages).ids

    def _forget(self) -> None:
        self._messages, self._tokens = [], []
