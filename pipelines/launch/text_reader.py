"""Reads a model's tokenizer and generation config on a thread of its own, while the model is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

import openvino_genai as genai

from staticllm.core import OnProgress, ProgressEvent
from staticllm.model_dir import joins_tokens
from staticllm.system.long_calls import LOOK_SECONDS, attended, checkpoint, told, unless
from staticllm.system.threads import LazyThread

from ..conversation.chat_templates import CHAT_TEMPLATES
from ..engine.request import EngineText
from ..generation.options.resolve import FileOptions
from ..grammars.compiler import GrammarCompiler
from ..grammars.vocabulary import read_vocabulary
from ..text.tokenizer_tools import TokenizerTools
from .arguments import (
    Given,
    ReadConfig,
    read_generation_config,
    read_tokenizer,
    read_tool_template,
)

READING = ProgressEvent("warm-up", 1, 1, 0.0)
"""What is shown while the programs are there, and the tokenizer is still read."""


@dataclass(frozen=True)
class TextFiles:
    """A model's tokenizer, and the generation options that its calls start from."""

    tokenizer: genai.Tokenizer
    tools: TokenizerTools
    generation_config: genai.GenerationConfig
    file_options: FileOptions | None = None
    """The options that the model's own file sets, None without one."""


class TextReader:
    """Reads the text files of a model directory that ``given`` does not replace, in a ``with`` block around its loading.

    Loading reports to ``on_progress``. Reading a tokenizer holds Python's lock, but compiling does not, so reading begins with
    the first program. Before ``ready`` is reported, reading has ended; if it failed, its error aborts the loading.
    """

    def __init__(self, model_path: Path, given: Given, on_progress: OnProgress | None) -> None:
        self._model_path = model_path
        self._given: Given | None = given  # None after the block, which background work outlives with ``on_progress``
        self._on_progress = on_progress
        self._files: TextFiles | None = None
        self._error: BaseException | None = None
        self._thread = LazyThread("staticllm-tokenizer")
        self._is_over = False

    def on_progress(self, event: ProgressEvent) -> None:
        """Begin to read with the first program, or wait for the end of it; then report the event."""
        if event.stage == "ready" and self._given is not None:
            with told(self._tell, READING):
                self.files()
        elif (
            not self._thread.has_begun
            and self._files is None
            and self._given is not None
            and event.stage in ("compile", "import")
        ):
            self._thread.start(self._read)
        self._tell(event)

    def _tell(self, event: ProgressEvent) -> None:
        if self._on_progress is not None:
            self._on_progress(event)

    def files(self) -> TextFiles:
        """Return what was read; wait for it, or read it now.

        Raises:
            ModelError: a file of the model cannot be read.
            GenerationConfigError: the model's own options cannot be used.
        """
        while not self._thread.join(LOOK_SECONDS):
            checkpoint()
        if self._files is None and self._error is None:
            self._read()
        if self._error is not None:
            raise self._error
        assert self._files is not None, "reading has ended"
        return self._files

    def engine_text(self) -> EngineText:
        """Return what an engine needs of the tokenizer; the first grammar reads the vocabulary.

        Raises:
            StaticLLMError: as for ``files``.
        """
        files = self.files()
        return EngineText(files.tools.decode, GrammarCompiler(partial(read_vocabulary, files.tokenizer)))

    def _read(self) -> None:
        try:
            given = self._given
            assert given is not None, "read after the block"
            with unless(lambda: self._is_over):
                tokenizer = given.tokenizer or attended(partial(read_tokenizer, self._model_path))
            own = given.generation_config
            read = read_generation_config(self._model_path, tokenizer) if own is None else ReadConfig(own)
            joins = given.tokenizer is None and joins_tokens(self._model_path)
            tool_template = read_tool_template(self._model_path) if given.tokenizer is None else ""
            tools = TokenizerTools(tokenizer, joins, tool_template, CHAT_TEMPLATES)
            self._files = TextFiles(tokenizer, tools, read.config, read.file)
        except BaseException as error:  # raised again by ``files``
            self._error = error

    def __enter__(self) -> TextReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._thread.join()
        self._files = None
        self._given = None
        self._error = None
