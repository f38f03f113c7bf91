"""Turns the arguments of a call into requests for the engine."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import openvino_genai as genai

from staticllm.adapters.adapter_set import AdapterSet, AdapterUse
from staticllm.config import StaticLLMConfig
from staticllm.errors import AdapterError, GenerationConfigError, shown
from staticllm.pipelines.conversation.formats import MessageFormat, format_beside
from staticllm.pipelines.conversation.required_calls import answer_grammar
from staticllm.pipelines.engine.client import UserProcessors
from staticllm.pipelines.engine.request import MAX_PRIORITY, EngineRequest, OverflowRule, overflow_rule, shorten
from staticllm.pipelines.generation.drafts import DEFAULT_NGRAM_SIZE, DraftParams
from staticllm.pipelines.generation.genai_adapters import adapter_uses
from staticllm.pipelines.generation.logits_processors import copies_for
from staticllm.pipelines.generation.options.genai import FileOptions
from staticllm.pipelines.generation.options.resolve import GenerationOptions, copy_config, limit_of, resolve
from staticllm.pipelines.generation.options.tools import ToolOptions
from staticllm.pipelines.text.detokenizer import IncrementalDetokenizer
from staticllm.pipelines.text.tokenization import (
    Form,
    Inputs,
    Messages,
    Prompt,
    TokenInputs,
    check_ids,
    encode_messages,
    encode_text,
    token_ids,
)
from staticllm.pipelines.text.tokenizer_tools import TokenizerTools


@dataclass(frozen=True)
class CallOptions:
    """The checked options of one call. ``started`` and ``deadline`` are ``time.perf_counter`` moments."""

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

    def check_overflow(self) -> None:
        """Check that the overflow rule goes with the decoding method.

        Raises:
            GenerationConfigError: beams, which cannot be shortened.
        """
        if self.options.beams is not None and self.overflow != "stop":
            raise GenerationConfigError(
                f"overflow={shown(self.overflow)} with num_beams: beams cannot be shortened; use 'stop'"
            )


@dataclass(frozen=True)
class PromptLimits:
    """Limits for a prompt: its tokens, the tokens of prompt and answer together, and the number of token ids.

    ``has_prompt_lookup`` and ``has_draft_model``: how the pipeline drafts the tokens of requests that do not say it.
    """

    max_prompt_len: int
    max_seq_len: int
    vocab_size: int
    has_prompt_lookup: bool = False
    has_draft_model: bool = False

    @classmethod
    def of(cls, config: StaticLLMConfig, vocab_size: int, has_draft_model: bool) -> PromptLimits:
        """Return the limits of a pipeline with this config."""
        return cls(config.max_prompt_len, config.max_seq_len, vocab_size, config.prompt_lookup, has_draft_model)


def no_text(tokens: list[int]) -> str:
    """Return "": the text of tokens where nothing can decode them."""
    return ""


@dataclass(frozen=True)
class PreparedRequest:
    """A checked request together with the details of the call that its reader needs.

    ``started`` and ``encoded`` are ``time.perf_counter`` moments. ``template_seconds`` is the time that the chat template
    took, None without a template. ``processors`` are the logits processors that the user made, per answer. ``decode`` makes
    text of tokens; ``format`` is None if the answer is not parsed.
    """

    request: EngineRequest
    form: Form
    options: GenerationOptions
    started: float
    encoded: float
    template_seconds: float | None = None
    processors: UserProcessors = ()
    decode: Callable[[list[int]], str] = no_text
    format: MessageFormat | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

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
    ) -> None:
        """``file_options``: those of ``generation_config`` that the model's own file sets."""
        self._tools = tools
        self._adapters = adapters
        self._file_options = file_options
        self._generation_config = copy_config(generation_config)
        if adapters is not None:
            self._generation_config.adapters = adapters.origin
        self._rng = random.Random(0)

    @property
    def generation_config(self) -> genai.GenerationConfig:
        """A copy of the default generation config, which every call starts from."""
        return copy_config(self._generation_config)

    @generation_config.setter
    def generation_config(self, config: genai.GenerationConfig) -> None:
        resolve(config, {}, self._file_options)
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

    def call_options(
        self,
        form: Form,
        config: object,
        overrides: dict[str, Any],
        overflow: OverflowRule,
        priority: int,
        deadline_ms: float | None,
    ) -> CallOptions:
        """Merge and check the options of one call. ``deadline_ms`` counts from now.

        Raises:
            GenerationConfigError: an option is unknown or a value is impossible.
        """
        started = time.perf_counter()
        options = resolve(*self._base_config(config, overrides), self._file_options)
        if not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
            raise GenerationConfigError(
                f"priority={shown(priority)}: must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        if deadline_ms is not None and (not isinstance(deadline_ms, (int, float)) or not deadline_ms > 0):
            raise GenerationConfigError(f"deadline_ms={shown(deadline_ms)}: must be milliseconds, more than 0")
        deadline = None if deadline_ms in (None, math.inf) else started + deadline_ms / 1e3
        return CallOptions(form, options, overflow_rule(overflow), priority, deadline, started)

    def encode(self, inputs: Inputs, call: CallOptions) -> list[Prompt]:
        """Return the token ids of every prompt. ``call.form`` is the form of ``inputs``, as ``form_of`` returns it.

        Raises:
            PromptError: a prompt is empty, malformed or refused by the chat template.
            GenerationConfigError: a chat history with ``apply_chat_template=False``.
            ModelError: the tokenizer cannot encode a prompt.
        """
        tools = call.options.extra.tool_options
        applies = call.options.apply_chat_template
        if call.form == "tokens" or (call.form != "history" and not (applies and self._tools.tokenizer.chat_template)):
            _check_no_tools(tools, "without a chat template")
        if call.form == "tokens":
            return [Prompt(ids) for ids in token_ids(cast(TokenInputs, inputs))]
        if call.form == "history":
            if not applies:
                raise GenerationConfigError(
                    "apply_chat_template=False with a chat history: leave it True, or pass a str"
                )
            return [encode_messages(self._tools.tokenizer, cast(Messages, inputs), tools, self._tools.tool_template)]
        tokenizer = self._tools.tokenizer
        tool_template = self._tools.tool_template
        return [encode_text(tokenizer, text, applies, tools, tool_template) for text in _texts_of(inputs, call.form)]

    def turns(self, inputs: Inputs, call: CallOptions) -> list[str | Prompt]:
        """Return the turns for a chat: texts unchanged, because the template needs the whole conversation, else token ids.

        Raises:
            PromptError, GenerationConfigError, ModelError: as for ``encode``.
        """
        _check_no_tools(call.options.extra.tool_options, "in a chat of start_chat")
        if call.form in ("text", "texts"):
            return [*_texts_of(inputs, call.form)]
        return [*self.encode(inputs, call)]

    def prepare(self, prompt: Prompt, call: CallOptions, limits: PromptLimits) -> PreparedRequest:
        """Return a request for the engine, with a checked prompt, a seed and a maximum number of new tokens.

        Raises:
            PromptError: the prompt has no tokens, or an id outside the vocabulary.
            PromptTooLongError: it has more tokens than ``limits.max_prompt_len``, and ``overflow`` is ``stop``.
            GenerationConfigError: ``max_length`` leaves no room after the prompt, or an option names a token outside the
                vocabulary.
            AdapterError: the pipeline was loaded without one of the adapters.
        """
        encoded = time.perf_counter()
        options = call.options
        ids = shorten(prompt.ids, limits.max_prompt_len, call.overflow)
        check_ids(ids, limits.vocab_size, limits.max_prompt_len, call.is_chat)
        options.check_room(len(ids))
        call.check_overflow()
        _check_tokens(options, limits.vocab_size)
        processors = copies_for(options.extra.logits_processors, ids, options.num_sequences)
        format = self._format_of(prompt, options.extra.tool_options)
        request = EngineRequest(
            prompt=tuple(ids),
            sampling=self._tools.word_tokens.complete(options),
            seed=self._seed_for(options),
            num_sequences=options.num_sequences,
            max_new_tokens=limit_of(options, len(ids), limits.max_seq_len if call.overflow == "stop" else None),
            stop_token_ids=options.stop_token_ids,
            late_token_ids=options.ignored_token_ids,
            min_new_tokens=options.min_new_tokens,
            priority=call.priority,
            deadline=call.deadline,
            overflow=call.overflow,
            beams=options.beams,
            stop_strings=() if options.beams is None else tuple(sorted(options.stop_strings)),
            drafts=_drafts_of(options, limits),
            grammar=answer_grammar(format, options),
            adapters=self._scales_of(options.adapters),
            arrival=call.started,
        )
        return PreparedRequest(
            request,
            call.form,
            options,
            call.started,
            encoded,
            prompt.template_seconds,
            processors,
            self._decoder_of(format),
            format,
            prompt.tools or options.extra.tool_options.tools,
        )

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
        """Return the factor of each adapter of the pipeline for a request.

        Raises:
            AdapterError: the pipeline was loaded without one of the request's adapters, or has folded its own into the weights.
        """
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

    def _base_config(self, config: object, overrides: dict[str, Any]) -> tuple[genai.GenerationConfig, dict[str, Any]]:
        if isinstance(config, Mapping):
            return self._generation_config, {**config, **overrides}
        if config is None:
            return self._generation_config, overrides
        if not isinstance(config, genai.GenerationConfig):
            raise GenerationConfigError(
                f"generation_config is a {type(config).__name__}: must be an openvino_genai.GenerationConfig or a dict"
            )
        return self._complete(config), overrides

    def _complete(self, config: genai.GenerationConfig) -> genai.GenerationConfig:
        """Return a copy whose missing stop and end tokens come from the model's own config, as in GenAI."""
        copied = copy_config(config)
        own = self._generation_config
        if not copied.stop_token_ids:
            copied.stop_token_ids = own.stop_token_ids
        if copied.eos_token_id == -1 and own.eos_token_id != -1:
            copied.set_eos_token_id(own.eos_token_id)
        return copied


def _check_no_tools(tools: ToolOptions, where: str) -> None:
    """Check that no option needs a chat template. Raises GenerationConfigError: one does."""
    for name, value in (("tools", tools.tools), ("extra_context", tools.extra_context)):
        if value:
            raise GenerationConfigError(f"{name} {where}: nothing would show them; pass a ChatHistory or messages")


def _check_tokens(options: GenerationOptions, vocab_size: int) -> None:
    """Check the tokens that ``logit_bias`` and ``bad_words_ids`` name.

    Raises:
        GenerationConfigError: one is outside the vocabulary.
    """
    extra = options.extra
    named = [token for token, _ in extra.logit_bias] + [token for row in extra.bad_words_ids for token in row]
    outside = [token for token in named if token >= vocab_size]
    if outside:
        raise GenerationConfigError(
            f"logit_bias or bad_words_ids names token {outside[0]}: ids go from 0 to {vocab_size - 1}"
        )


def _texts_of(inputs: Inputs, form: Form) -> Sequence[str]:
    return [cast(str, inputs)] if form == "text" else cast(Sequence[str], inputs)


def _drafts_of(options: GenerationOptions, limits: PromptLimits) -> DraftParams | None:
    """Return how the tokens of a request are drafted: as its options say, with what the pipeline adds; None without drafts.

    Raises:
        GenerationConfigError: the options need a draft model, and there is none.
    """
    asked = options.drafts
    is_single = options.num_sequences == 1
    if asked is None and not (is_single and (limits.has_prompt_lookup or limits.has_draft_model)):
        return None
    drafts = asked or DraftParams()
    if limits.has_prompt_lookup and not drafts.max_ngram_size:
        drafts = replace(drafts, max_ngram_size=DEFAULT_NGRAM_SIZE)
    if not drafts.max_ngram_size and not limits.has_draft_model:
        if not options.asks_for_drafts:
            return None  # options of a draft model that come from a config have no effect without one
        is_confidence = drafts.confidence > 0
        name = "assistant_confidence_threshold" if is_confidence else "num_assistant_tokens"
        raise GenerationConfigError(
            f"{name}={drafts.confidence if is_confidence else drafts.max_tokens} without a draft model: load with draft_model, "
            "or set max_ngram_size for prompt lookup"
        )
    return replace(drafts, uses_model=limits.has_draft_model)
