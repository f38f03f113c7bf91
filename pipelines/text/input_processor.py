"""Turns the inputs and the arguments of a call into token ids, checked options, and requests for the engine."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import openvino_genai as genai

from staticllm.adapters.adapter_set import AdapterSet, AdapterUse
from staticllm.config import StaticLLMConfig, as_float
from staticllm.errors import AdapterError, GenerationConfigError, shown

from ..engine.overflow import OverflowRule, overflow_rule, shorten
from ..engine.request import EngineRequest, check_priority
from ..generation.drafts import DEFAULT_NGRAM_SIZE, DraftParams
from ..generation.genai_adapters import adapter_uses
from ..generation.grammar import Grammar
from ..generation.logits_processors import copies_for
from ..generation.options.extra import ToolOptions
from ..generation.options.resolve import FileOptions, GenerationOptions, copy_config, resolve
from .call import GenerateCall, PreparedRequest
from .chat_prompt import Prompt, encode_infill, encode_messages, encode_text
from .conversations import AnswerFormat, AnswerParser
from .inputs import Form, Inputs, Messages, TokenInputs, check_ids, texts_of, token_ids
from .tokenizer_tools import TokenizerTools

ROOM = 128
"""Tokens of the answer, or a quarter of the longest sequence, for which a prompt that is shortened leaves room, if no lengths are
given."""


def check_deadline(deadline_ms: float | None) -> float:
    """Return a deadline in milliseconds, infinity for None.

    Raises:
        GenerationConfigError: it is no number above 0.
    """
    limit = math.inf if deadline_ms is None else as_float(deadline_ms)
    if limit is None or not limit > 0:
        raise GenerationConfigError(f"deadline_ms={shown(deadline_ms)}: must be milliseconds, more than 0")
    return limit


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
            self._generation_config.adapters = adapters.given
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
        limit = check_deadline(deadline_ms)
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
        suffix = call.options.extra.suffix
        if suffix is not None:
            _check_no_tools(asked, "with suffix")
            if call.form in ("tokens", "history"):
                raise GenerationConfigError("suffix goes with texts: pass the text before it as a str")
            return [encode_infill(self._tools.tokenizer, text, suffix) for text in texts_of(inputs, call.form)]
        if call.form == "tokens":
            _check_no_tools(asked, "without a chat template")
            return [Prompt(ids) for ids in token_ids(cast(TokenInputs, inputs))]
        tokenizer = self._tools.tokenizer
        conversations = self._tools.conversations
        applies = call.options.apply_chat_template
        if call.form == "history":
            if not applies:
                raise GenerationConfigError(
                    "apply_chat_template=False with a chat history: leave it True, or pass a str"
                )
            return [encode_messages(tokenizer, conversations, cast(Messages, inputs), asked, self._tools.tool_template)]
        texts = texts_of(inputs, call.form)
        if not (applies and tokenizer.chat_template):
            _check_no_tools(asked, "without a chat template")
            return [encode_text(tokenizer, text) for text in texts]
        template = self._tools.tool_template
        turns = [[{"role": "user", "content": text}] for text in texts]
        return [encode_messages(tokenizer, conversations, turn, asked, template) for turn in turns]

    def turns(self, inputs: Inputs, call: GenerateCall) -> list[str | Prompt]:
        """Return the turns for a chat: texts unchanged, because the template needs the whole conversation, else token ids.

        Raises:
            PromptError, GenerationConfigError, ModelError: as for ``encode``.
        """
        _check_no_tools(call.options.extra.tool_options, "in a chat of start_chat")
        if call.options.extra.suffix is not None:
            raise GenerationConfigError("suffix in a chat of start_chat: finish_chat first")
        if call.form in ("text", "texts"):
            return [*texts_of(inputs, call.form)]
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
        room = min(ROOM, config.max_seq_len // 4) if config.min_response_len == 1 else 1
        ids = shorten(prompt.ids, min(config.max_prompt_len, config.max_seq_len - room), call.overflow)
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
            stop_token_ids=options.stop_token_ids | prompt.stops,
            late_token_ids=options.ignored_token_ids,
            min_new_tokens=options.min_new_tokens,
            priority=call.priority,
            deadline=call.deadline,
            overflow=call.overflow,
            beams=options.beams,
            stop_strings=() if options.beams is None else tuple(sorted(options.stop_strings)),
            drafts=self._drafts_of(options, config.prompt_lookup),
            grammar=self._grammar_of(format, options),
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
            new_parser=self._parser_of(format, prompt.tools or asked.tools, options),
            num_dropped=len(prompt.ids) - len(ids),
        )

    def _drafts_of(self, options: GenerationOptions, has_prompt_lookup: bool) -> DraftParams | None:
        """Return how tokens are drafted, with what the pipeline adds.

        Raises:
            GenerationConfigError: a draft model is missing.
        """
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

    def _format_of(self, prompt: Prompt, tools: ToolOptions) -> AnswerFormat | None:
        """Return the format of the answer; None if it is not parsed."""
        if not (bool(tools.tools) if tools.parse is None else tools.parse):
            return None
        template = prompt.chat_template or str(self._tools.tokenizer.chat_template)
        return self._tools.conversations.format_of(template, bool(prompt.tools), prompt.ending)

    def _grammar_of(self, format: AnswerFormat | None, options: GenerationOptions) -> Grammar | None:
        """Return the grammar of the answer: that of the options, unless it is parsed or there are tools."""
        if format is None and not options.extra.tool_options.tools:
            return options.grammar
        return self._tools.conversations.grammar_of(format, options)

    def _parser_of(
        self, format: AnswerFormat | None, tools: Sequence[Mapping[str, Any]], options: GenerationOptions
    ) -> Callable[[], AnswerParser] | None:
        """Return what makes the parser of an answer; None if it is not parsed."""
        return None if format is None else partial(self._tools.conversations.parser_of, format, tools, options)

    def _decoder_of(self, format: AnswerFormat | None) -> Callable[[list[int]], str]:
        """Return the detokenizer; it keeps the format's markers if the answer is parsed."""
        tools = self._tools
        return tools.decode if format is None else tools.special_tokens.decoder(format.markers, tools.decode)

    def _scales_of(self, uses: tuple[AdapterUse, ...] | None) -> tuple[float, ...]:
        """Return the factor of each adapter.

        Raises:
            AdapterError: one is not loaded, or all are folded into the weights.
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
    """Return a config that a caller gave.

    Raises:
        GenerationConfigError: it is no ``expected`` one.
    """
    if not isinstance(config, genai.GenerationConfig):
        raise GenerationConfigError(f"generation_config is a {type(config).__name__}: must be {expected}")
    return config


def _check_no_tools(tools: ToolOptions, where: str) -> None:
    """Check that no option needs a chat template.

    Raises:
        GenerationConfigError: one does.
    """
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
