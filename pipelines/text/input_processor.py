"""Turns the inputs and the arguments of a call into token ids, checked options, and requests for the engine."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import openvino as ov
import openvino_genai as genai
from numpy.typing import NDArray

from staticllm.adapters.adapter_set import AdapterSet, AdapterUse
from staticllm.config import StaticLLMConfig, as_float
from staticllm.devices import read_first_tensor
from staticllm.errors import (
    AdapterError,
    GenerationConfigError,
    PromptError,
    PromptTooLongError,
    encoding,
    shown,
)

from ..conversation.chat_template import render
from ..conversation.formats import MessageFormat, format_beside
from ..conversation.required_calls import answer_grammar
from ..engine.client import UserProcessors
from ..engine.overflow import OverflowRule, overflow_rule, shorten
from ..engine.request import EngineRequest, check_priority
from ..generation.drafts import DEFAULT_NGRAM_SIZE, DraftParams
from ..generation.genai_adapters import adapter_uses
from ..generation.logits_processors import copies_for
from ..generation.options.extra import ToolOptions, function_of, is_tool
from ..generation.options.resolve import FileOptions, GenerationOptions, copy_config, resolve
from .detokenizer import IncrementalDetokenizer
from .tokenizer_tools import TokenizerTools

read_first_tensor()

Form = Literal["text", "texts", "history", "tokens"]
TokenInputs: TypeAlias = NDArray[Any] | ov.Tensor | genai.TokenizedInputs
"""Token ids ``[n]`` or ``[batch, n]``, of an integer type."""
Messages: TypeAlias = genai.ChatHistory | Sequence[Mapping[str, object]]
Inputs: TypeAlias = str | Sequence[str] | Messages | TokenInputs

MAX_ENDING_CHARS = 256
_HALF_PAIRS = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON can name and UTF-8 cannot hold: models write them into the arguments of calls."""


@dataclass(frozen=True)
class Prompt:
    """The token ids of one prompt.

    ``template_seconds`` is the time that the chat template took, None without a template; ``ending`` holds the last characters
    of its text. ``tools`` are the functions that it shows, ``chat_template`` is the template that made it.
    """

    ids: list[int]
    template_seconds: float | None = None
    ending: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template: str = ""


def form_of(inputs: object) -> Form:
    """Return which of GenAI's input forms ``inputs`` has. Raises PromptError: it has none of them, or is an empty list."""
    if isinstance(inputs, str):
        return "text"
    if isinstance(inputs, genai.ChatHistory):
        return "history"
    if isinstance(inputs, (np.ndarray, ov.Tensor, genai.TokenizedInputs)):
        return "tokens"
    if isinstance(inputs, Sequence) and all(isinstance(item, str) for item in inputs):
        if not inputs:
            raise PromptError("the list of prompts is empty: give at least one str")
        return "texts"
    if isinstance(inputs, Sequence) and all(isinstance(item, Mapping) for item in inputs):
        return "history"
    raise PromptError(
        f"inputs are a {type(inputs).__name__}: must be a str, a list of str, token ids "
        "(numpy, openvino.Tensor or TokenizedInputs), a ChatHistory or a list of messages"
    )


@dataclass(frozen=True)
class GenerateCall:
    """The checked arguments of one call. ``started`` and ``deadline`` are ``time.perf_counter`` moments."""

    form: Form
    options: GenerationOptions
    overflow: OverflowRule
    priority: int
    deadline: float | None
    started: float
    is_chat: bool = False

    def check_single(self, receiver: str) -> None:
        """Check that one answer per prompt is requested, whose tokens are known one by one.

        Raises:
            GenerationConfigError: there are several, and ``receiver`` could not tell them apart; or beams.
        """
        count = self.options.num_sequences
        beams = self.options.beams
        if beams is not None:
            raise GenerationConfigError(
                f"a {receiver} for num_beams={beams.num_beams}: the tokens are known at the end; leave one of them out"
            )
        if count > 1:
            raise GenerationConfigError(
                f"a {receiver} for {count} answers: it could not tell the answers apart; leave one of them out"
            )


def no_text(tokens: list[int]) -> str:
    """Return "": the text of tokens where nothing can decode them."""
    return ""


@dataclass(frozen=True)
class PreparedRequest:
    """A checked request together with the details of the call that its reader needs.

    ``encoded`` is a ``time.perf_counter`` moment. ``template_seconds`` is the time that the chat template took, None without a
    template. ``processors`` are the logits processors that the user made, per answer. ``decode`` makes text of tokens; ``format``
    is None if the answer is not parsed. ``num_dropped``: the tokens of the prompt that its overflow rule left out.
    """

    request: EngineRequest
    call: GenerateCall
    encoded: float
    template_seconds: float | None = None
    processors: UserProcessors = ()
    decode: Callable[[list[int]], str] = no_text
    format: MessageFormat | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    num_dropped: int = 0

    @property
    def options(self) -> GenerationOptions:
        """The checked options."""
        return self.call.options

    def detokenizer(self, decode: Callable[[list[int]], str] | None = None) -> IncrementalDetokenizer:
        """Return what decodes an answer and finds its stop strings, with ``decode`` in the place of the request's own.

        Where a grammar writes the content, stop strings do not count in the reasoning and the layout before it.
        """
        options = self.options
        grammar = self.request.grammar
        lead = () if grammar is None else filter(None, (grammar.opening, grammar.reasoning_end))
        decode = decode or self.decode
        include_stop = options.include_stop_str_in_output
        return IncrementalDetokenizer(decode, options.stop_strings, include_stop, tuple(lead))


class InputProcessor:
    """Tokenizes prompts and merges options with the default generation config. Runs on the caller's thread."""

    def __init__(
        self,
        tools: TokenizerTools,
        generation_config: genai.GenerationConfig,
        adapters: AdapterSet | None = None,
        file_options: FileOptions | None = None,
        has_draft_model: bool = False,
    ) -> None:
        """``file_options``: those of ``generation_config`` that the model's own file sets."""
        self._tools = tools
        self._adapters = adapters
        self._file_options = file_options
        self._generation_config = copy_config(generation_config)
        if adapters is not None:
            self._generation_config.adapters = adapters.origin
        self._has_draft_model = has_draft_model
        self._rng = random.Random(0)

    @property
    def generation_config(self) -> genai.GenerationConfig:
        """A copy of the default generation config, which every call starts from."""
        return copy_config(self._generation_config)

    @generation_config.setter
    def generation_config(self, config: genai.GenerationConfig) -> None:
        resolve(_checked_config(config, "an openvino_genai.GenerationConfig"), {}, self._file_options)
        self._generation_config = self._complete(config)

    @property
    def adapter_scales(self) -> tuple[float, ...]:
        """The factors of the adapters of the default generation config."""
        return self._scales_of(adapter_uses(self._generation_config.adapters))

    def adapter_identity(self) -> dict[str, str]:
        """Return what identifies these adapters in another process; empty if there are none."""
        own = self._adapters
        scales = self.adapter_scales
        if own is None or not (scales or own.is_fused):
            return {}
        return {"adapters": own.description if own.is_fused else own.name_of(scales)}

    def call(
        self,
        form: Form,
        config: object,
        overrides: Mapping[str, Any],
        *,
        overflow: OverflowRule = "stop",
        priority: int = 0,
        deadline_ms: float | None = None,
    ) -> GenerateCall:
        """Merge and check the arguments of one call. ``deadline_ms`` counts from now.

        Raises:
            GenerationConfigError: an option is unknown or a value is impossible.
        """
        started = time.perf_counter()
        options = resolve(*self._base_config(config, overrides), self._file_options)
        check_priority(priority)
        limit = math.inf if deadline_ms is None else as_float(deadline_ms)
        if limit is None or not limit > 0:
            raise GenerationConfigError(f"deadline_ms={shown(deadline_ms)}: must be milliseconds, more than 0")
        deadline = None if limit == math.inf else started + limit / 1e3
        rule = overflow_rule(overflow)
        if options.beams is not None and rule != "stop":
            raise GenerationConfigError(f"overflow={shown(rule)} with num_beams: beams cannot be shortened; use 'stop'")
        return GenerateCall(form, options, rule, priority, deadline, started)

    def encode(self, inputs: Inputs, call: GenerateCall) -> list[Prompt]:
        """Return the token ids of every prompt. ``call.form`` is the form of ``inputs``, as ``form_of`` returns it.

        Raises:
            PromptError: a prompt is empty, malformed or refused by the chat template.
            GenerationConfigError: a chat history with ``apply_chat_template=False``.
            ModelError: the tokenizer cannot encode a prompt.
        """
        asked = call.options.extra.tool_options
        if call.form == "tokens":
            _check_no_tools(asked, "without a chat template")
            return [Prompt(ids) for ids in token_ids(cast(TokenInputs, inputs))]
        tokenizer = self._tools.tokenizer
        applies = call.options.apply_chat_template
        if call.form == "history":
            if not applies:
                raise GenerationConfigError(
                    "apply_chat_template=False with a chat history: leave it True, or pass a str"
                )
            return [encode_messages(tokenizer, cast(Messages, inputs), asked, self._tools.tool_template)]
        texts = _texts_of(inputs, call.form)
        if not (applies and tokenizer.chat_template):
            _check_no_tools(asked, "without a chat template")
            return [encode_text(tokenizer, text) for text in texts]
        template = self._tools.tool_template
        return [encode_messages(tokenizer, [{"role": "user", "content": text}], asked, template) for text in texts]

    def turns(self, inputs: Inputs, call: GenerateCall) -> list[str | Prompt]:
        """Return the turns for a chat: texts unchanged, because the template needs the whole conversation, else token ids.

        Raises:
            PromptError, GenerationConfigError, ModelError: as for ``encode``.
        """
        _check_no_tools(call.options.extra.tool_options, "in a chat of start_chat")
        if call.form in ("text", "texts"):
            return [*_texts_of(inputs, call.form)]
        return [*self.encode(inputs, call)]

    def prepare(self, prompt: Prompt, call: GenerateCall, config: StaticLLMConfig, vocab_size: int) -> PreparedRequest:
        """Return a request for the engine, with a checked prompt, a seed and a maximum number of new tokens.

        Raises:
            PromptError: the prompt has no tokens, or an id outside the vocabulary.
            PromptTooLongError: it has more tokens than ``config.max_prompt_len``, and ``overflow`` is ``stop``.
            GenerationConfigError: ``max_length`` leaves no room after the prompt, or an option names a token outside the
                vocabulary.
            AdapterError: the pipeline was loaded without one of the adapters.
        """
        encoded = time.perf_counter()
        options = call.options
        ids = shorten(prompt.ids, config.max_prompt_len, call.overflow)
        check_ids(ids, vocab_size, config.max_prompt_len, call.is_chat)
        max_new_tokens = options.max_tokens_after(len(ids), config.max_seq_len if call.overflow == "stop" else None)
        _check_tokens(options, vocab_size)
        own = options.extra.logits_processors
        asked = options.extra.tool_options
        format = self._format_of(prompt, asked)
        request = EngineRequest(
            prompt=tuple(ids),
            sampling=self._tools.word_tokens.complete(options),
            seed=self._seed_for(options),
            num_sequences=options.num_sequences,
            max_new_tokens=max_new_tokens,
            stop_token_ids=options.stop_token_ids,
            late_token_ids=options.ignored_token_ids,
            min_new_tokens=options.min_new_tokens,
            priority=call.priority,
            deadline=call.deadline,
            overflow=call.overflow,
            beams=options.beams,
            stop_strings=() if options.beams is None else tuple(sorted(options.stop_strings)),
            drafts=self._drafts_of(options, config.prompt_lookup),
            grammar=answer_grammar(format, options) if asked.tools or format is not None else options.grammar,
            adapters=self._scales_of(options.adapters),
            arrival=call.started,
        )
        return PreparedRequest(
            request,
            call,
            encoded,
            template_seconds=prompt.template_seconds,
            processors=copies_for(own, ids, options.num_sequences) if own else (),
            decode=self._decoder_of(format),
            format=format,
            tools=prompt.tools or asked.tools,
            num_dropped=len(prompt.ids) - len(ids),
        )

    def _drafts_of(self, options: GenerationOptions, has_prompt_lookup: bool) -> DraftParams | None:
        """Return how tokens are drafted, with what the pipeline adds. Raises GenerationConfigError: a draft model is missing."""
        has_model = self._has_draft_model
        is_single = options.num_sequences == 1
        if options.drafts is None and not (is_single and (has_prompt_lookup or has_model)):
            return None
        drafts = options.drafts or DraftParams()
        if has_prompt_lookup and not drafts.max_ngram_size:
            drafts = replace(drafts, max_ngram_size=DEFAULT_NGRAM_SIZE)
        if not drafts.max_ngram_size and not has_model:
            if not options.asks_for_drafts:
                return None  # options of a draft model that come from a config have no effect without one
            is_confidence = drafts.confidence > 0
            name = "assistant_confidence_threshold" if is_confidence else "num_assistant_tokens"
            raise GenerationConfigError(
                f"{name}={drafts.confidence if is_confidence else drafts.max_tokens} without a draft model: load with "
                "draft_model, or set max_ngram_size for prompt lookup"
            )
        return replace(drafts, uses_model=has_model)

    def _format_of(self, prompt: Prompt, tools: ToolOptions) -> MessageFormat | None:
        """Return the format of the answer; None if it is not parsed."""
        if not (bool(tools.tools) if tools.parse is None else tools.parse):
            return None
        template = prompt.chat_template or str(self._tools.tokenizer.chat_template)
        return format_beside(template, bool(prompt.tools)).after(prompt.ending)

    def _decoder_of(self, format: MessageFormat | None) -> Callable[[list[int]], str]:
        """Return what makes text of tokens, with the markers of a format that is parsed."""
        tools = self._tools
        return tools.decode if format is None else tools.special_tokens.decoder(format.markers, tools.decode)

    def _scales_of(self, uses: tuple[AdapterUse, ...] | None) -> tuple[float, ...]:
        """Return the factor of each adapter. Raises AdapterError: one is not loaded, or all are folded into the weights."""
        own = self._adapters
        if own is None:
            if uses:
                raise AdapterError(
                    "this pipeline was loaded without adapters: give the constructor adapters=AdapterConfig(...)"
                )
            return ()
        try:
            scales = own.scales(uses)
        except KeyError:
            raise AdapterError(
                "an adapter that this pipeline was loaded without: give all adapters to its constructor"
            ) from None
        if not own.is_fused:
            return scales
        if scales != own.scales(None):
            raise AdapterError("MODE_FUSE: the adapters are part of the weights: load without this mode to change them")
        return ()

    def _seed_for(self, options: GenerationOptions) -> int:
        """Return the requested seed; for 0, which means unseeded as in GenAI, return a new one."""
        return options.sampling.rng_seed or self._rng.randrange(1, 2**63)

    def _base_config(
        self, config: object, overrides: Mapping[str, Any]
    ) -> tuple[genai.GenerationConfig, Mapping[str, Any]]:
        if isinstance(config, Mapping):
            return self._generation_config, {**config, **overrides}
        if config is None:
            return self._generation_config, overrides
        return self._complete(_checked_config(config, "an openvino_genai.GenerationConfig or a dict")), overrides

    def _complete(self, config: genai.GenerationConfig) -> genai.GenerationConfig:
        """Return a copy whose missing stop and end tokens come from the model's own config, as in GenAI."""
        copied = copy_config(config)
        own = self._generation_config
        if not copied.stop_token_ids:
            copied.stop_token_ids = own.stop_token_ids
        if copied.eos_token_id == -1 and own.eos_token_id != -1:
            copied.set_eos_token_id(own.eos_token_id)
        return copied


def _checked_config(config: object, expected: str) -> genai.GenerationConfig:
    """Return a config that a caller gave. Raises GenerationConfigError: it is no ``expected`` one."""
    if not isinstance(config, genai.GenerationConfig):
        raise GenerationConfigError(f"generation_config is a {type(config).__name__}: must be {expected}")
    return config


def _check_no_tools(tools: ToolOptions, where: str) -> None:
    """Check that no option needs a chat template. Raises GenerationConfigError: one does."""
    for name, value in (("tools", tools.tools), ("extra_context", tools.extra_context)):
        if value:
            raise GenerationConfigError(f"{name} {where}: nothing would show them; pass a ChatHistory or messages")


def _check_tokens(options: GenerationOptions, vocab_size: int) -> None:
    """Raise GenerationConfigError if ``logit_bias`` or ``bad_words_ids`` names a token outside the vocabulary."""
    extra = options.extra
    named = [token for token, _ in extra.logit_bias] + [token for row in extra.bad_words_ids for token in row]
    outside = [token for token in named if token >= vocab_size]
    if outside:
        raise GenerationConfigError(
            f"logit_bias or bad_words_ids names token {outside[0]}: ids go from 0 to {vocab_size - 1}"
        )


def _texts_of(inputs: Inputs, form: Form) -> Sequence[str]:
    return [cast(str, inputs)] if form == "text" else cast(Sequence[str], inputs)


def encode_text(tokenizer: genai.Tokenizer, text: str) -> Prompt:
    """Return the ids of a text without a chat template.

    Raises:
        PromptError: it is empty or not valid text.
        ModelError: the tokenizer cannot encode it.
    """
    _check_text(text)
    if not text:
        raise PromptError("the prompt is empty: give at least one character")
    return Prompt(_encoded(tokenizer, text)[0])


_NO_TOOLS = ToolOptions()


def encode_messages(
    tokenizer: genai.Tokenizer, messages: Messages, options: ToolOptions = _NO_TOOLS, tool_template: str = ""
) -> Prompt:
    """Return the ids of a conversation (a list of messages or a ChatHistory) up to the header of the assistant's answer.

    The tools and the extra context in ``options`` replace those of a ChatHistory, if there are any. ``tool_template`` takes the
    place of the tokenizer's chat template where there are tools; "" if there is none of its own. As in GenAI, an empty text of
    the user is a prompt if the template makes tokens of it.

    Raises:
        PromptError: the conversation is empty or malformed, or the model has no chat template, or it refuses the conversation.
        ModelError: the tokenizer cannot encode the conversation.
    """
    turns, tools, extra = _parts_of(messages)
    for turn in turns:
        _check_message(turn)
    tools = [] if options.choice == "none" else _tools_for(options) or tools
    if not turns:
        raise PromptError("the chat history is empty: append a message of the user")
    if not tokenizer.chat_template:
        raise PromptError("the model has no chat template: pass the prompt as a str, or set one on the tokenizer")
    start = time.perf_counter()
    tokens = {
        "bos_token": tokenizer.get_bos_token(),
        "eos_token": tokenizer.get_eos_token(),
        "pad_token": tokenizer.get_pad_token(),
    }
    template = tool_template if tools and tool_template else str(tokenizer.chat_template)
    text = _HALF_PAIRS.sub("\ufffd", render(template, turns, tokens, tools, {**extra, **options.extra_context}))
    seconds = time.perf_counter() - start
    ids = _encoded(tokenizer, text, add_special_tokens=False)[0]
    return Prompt(ids, seconds, text[-MAX_ENDING_CHARS:], tuple(filter(is_tool, tools)), template)


def _tools_for(options: ToolOptions) -> list[dict[str, Any]]:
    """Return the tools as templates take them."""
    return [{"type": "function", "function": dict(function_of(tool))} for tool in options.tools]


def _encoded(tokenizer: genai.Tokenizer, text: str, **options: Any) -> list[list[int]]:
    with encoding(f"{len(text)} characters"):
        return _real_ids(tokenizer.encode(text, **options))


def _parts_of(messages: Any) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """Return the messages, the tools and the extra context."""
    if isinstance(messages, genai.ChatHistory):
        return messages.get_messages(), messages.get_tools(), messages.get_extra_context()
    return list(messages), [], {}


def _check_message(message: Mapping[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise PromptError(f"a message has the keys {sorted(map(str, message))}: it needs a 'role', and a 'content'")
    content = message.get("content")
    if isinstance(content, str):
        _check_text(content)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        broken = text[error.start]
        raise PromptError(
            f"the prompt has {broken!r} at index {error.start}, half a character (a lone surrogate): remove it"
        ) from error


def token_ids(inputs: TokenInputs) -> list[list[int]]:
    """Return the ids of each prompt in a numpy array or ``openvino.Tensor`` (``[n]`` or ``[batch, n]``) or ``TokenizedInputs``.

    Padding in ``TokenizedInputs`` is removed.

    Raises:
        PromptError: the type or the shape is wrong.
    """
    if isinstance(inputs, genai.TokenizedInputs):
        return _real_ids(inputs)
    array = np.asarray(inputs.data if isinstance(inputs, ov.Tensor) else inputs)
    if array.dtype.kind not in "iu":
        raise PromptError(f"token ids are {array.dtype}: must be whole numbers")
    ids: list[list[int]] = _as_rows(array).tolist()
    return ids


def check_ids(ids: list[int], vocab_size: int, limit: int, is_chat: bool = False) -> None:
    """Check the token ids of one prompt.

    Raises:
        PromptError: the prompt has no tokens, or an id outside the vocabulary.
        PromptTooLongError: it has more tokens than ``limit``.
    """
    if not ids:
        raise PromptError("the prompt has no tokens: give at least one")
    if len(ids) > limit:
        raise PromptTooLongError(len(ids), limit, is_chat)
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise PromptError(f"token id {outside[0]} is outside the vocabulary: ids go from 0 to {vocab_size - 1}")


def _real_ids(tokenized: genai.TokenizedInputs) -> list[list[int]]:
    ids = _as_rows(np.asarray(tokenized.input_ids.data))
    mask = _as_rows(np.asarray(tokenized.attention_mask.data))
    if ids.shape != mask.shape or ids.dtype.kind not in "iu":
        raise PromptError(
            f"TokenizedInputs with {ids.size} ids of {ids.dtype} and a mask of {mask.size}: "
            "must be whole numbers, with one mask value per id"
        )
    return [row[seen != 0].tolist() for row, seen in zip(ids, mask, strict=True)]


def _as_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.ndim not in (1, 2) or (array.ndim == 2 and not array.shape[0]):
        raise PromptError(f"token ids have the shape {list(array.shape)}: must be [n] or [batch, n]")
    return np.atleast_2d(array)
