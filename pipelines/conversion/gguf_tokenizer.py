"""Makes a tokenizer and a detokenizer of the vocabulary in a GGUF file, as ``openvino_tokenizers`` makes them of others.

Two kinds of vocabularies are known, which nearly all chat models have: pairs of bytes (``gpt2``), whose texts are split by
regular expressions that ``tokenizer.ggml.pre`` names, and SentencePiece's pairs with scores (``llama``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov

from staticllm.errors import ModelError, shown
from staticllm.sources.gguf_header import GGUFHeader

if TYPE_CHECKING:
    from openvino_tokenizers.tokenizer_pipeline import BasePipelineStep

KIND, PRE, TOKENS, TYPES = (
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
)
MERGES, SCORES, TEMPLATE = "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.chat_template"
ADD_BOS, ADD_EOS, ADD_SPACE = (f"tokenizer.ggml.add_{what}" for what in ("bos_token", "eos_token", "space_prefix"))
BYTE_PAIRS, SCORED_PAIRS = "gpt2", "llama"
"""Values of ``tokenizer.ggml.model``."""
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Values of ``tokenizer.ggml.token_type``."""
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|eot|>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
"""Tokens that end a turn or a text."""
ENDS_OF_TEXT = ("</s>", "<eos>")
"""Tokens that end a text if a file does not say which does; elsewhere they may be text, such as HTML's."""
_SPACE = "▁"
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_BY_THREE, _BY_ONE = (_CASELESS.format(digits=digits) for digits in ("{1,3}", ""))
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?((?=[\p{{L}}])([^a-z]))*((?=[\p{{L}}])([^A-Z]))+{ends}|[^\r\n\p{{L}}\p{{N}}]?((?=[\p{{L}}])([^a-z]))+"
    r"((?=[\p{{L}}])([^A-Z]))*{ends}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jais", "trillion", "granite-docling", "mpt", "olmo"), (_WORDS,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_DIGIT, _WORDS)
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "smaug-bpe", "dbrx", "lfm2"),
        (_BY_THREE,),
    ),
    **dict.fromkeys(("chatglm-bpe", "glm4", "olmo2", "exaone4", "bailingmoe2", "gigachat"), (_BY_THREE,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), (_BY_ONE,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_CASED.format(digits="{1,3}", ends=_ENDS),)),
    "tekken": (_CASED.format(digits="", ends=""),),
}
"""The regular expressions, one after another, by which texts are split before pairs are merged."""
_NFC = frozenset(("qwen2", "deepseek-r1-qwen", "megrez"))
"""Splits before which text is normalised to NFC."""


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the tokens that begin and end texts; None without one. ``ends``: all that end a turn."""

    bos: int | None
    eos: int | None
    pad: int | None
    ends: tuple[int, ...]


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file, and which of them are found in texts as they are."""

    tokens: list[str]
    types: np.ndarray[Any, Any]

    def of_type(self, *types: int) -> dict[str, int]:
        return {self.tokens[place]: int(place) for place in np.flatnonzero(np.isin(self.types, types))}


def special_tokens(header: GGUFHeader) -> SpecialTokens:
    """Return the special tokens. Raises ``ModelError`` (an id is not in the vocabulary)."""
    tokens = _tokens(header)
    names = ("bos", "eos", "padding", "eot", "eom")
    bos, eos, pad, eot, eom = (_id(header, what, len(tokens)) for what in names)
    known = _vocabulary(header).of_type(CONTROL, USER_DEFINED)
    texts = ENDS if eos is not None else (*ENDS, *ENDS_OF_TEXT)
    others = (known[text] for text in texts if text in known)
    ends = tuple(dict.fromkeys(each for each in (eos, eot, eom, *others) if each is not None))
    return SpecialTokens(bos, eos if eos is not None else next(iter(ends), None), pad, ends)


def _id(header: GGUFHeader, what: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{what}_token_id"
    value = header.metadata.get(key)
    if value is None:
        return None
    number = header.number(key)
    if number is None or not 0 <= number < num_tokens:
        raise ModelError(f"{str(header.path)!r} has {key} {shown(value)}, and {num_tokens} tokens: download it again")
    return number


def _flag(header: GGUFHeader, key: str, default: bool) -> bool:
    """Return a setting. Raises ``ModelError`` (it is neither true nor false)."""
    value = header.metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(
            f"{str(header.path)!r} has {key} {shown(value)}, which must be true or false: download it again"
        )
    return value


def _tokens(header: GGUFHeader) -> list[str]:
    tokens = header.metadata.get(TOKENS)
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{str(header.path)!r} has no vocabulary ({TOKENS}): it is no language model")
    return tokens


def _vocabulary(header: GGUFHeader) -> _Vocabulary:
    """Return the tokens and their types. Those that begin and end texts are control tokens, whatever the file says."""
    tokens = _tokens(header)
    types = header.metadata.get(TYPES)
    if types is None:
        types = np.full(len(tokens), NORMAL)
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise ModelError(f"{str(header.path)!r} has {len(tokens)} tokens and other types of them: download it again")
    types = types.copy()
    for what in ("bos", "eos", "eot"):
        place = _id(header, what, len(tokens))
        if place is not None:
            types[place] = CONTROL
    if not np.isin(types, (CONTROL, USER_DEFINED)).any():
        raise ModelError(f"{str(header.path)!r} does not say which token ends a text ({TYPES}): download it again")
    return _Vocabulary(tokens, types)


def check_vocabulary(header: GGUFHeader) -> None:
    """Raise ``ModelError`` if the vocabulary is missing, or of a kind that cannot be read."""
    _vocabulary(header)
    kind = header.text(KIND)
    if kind not in (BYTE_PAIRS, SCORED_PAIRS):
        raise ModelError(
            f"{str(header.path)!r} has a vocabulary of the kind {shown(kind)}, and {BYTE_PAIRS} and {SCORED_PAIRS} can be "
            "read: export the original model with `staticllm export`"
        )
    pre = header.text(PRE, "default")
    if kind == BYTE_PAIRS and pre not in SPLITS:
        raise ModelError(
            f"{str(header.path)!r} splits texts in a way that is not known ({PRE} is {shown(pre)}): "
            "export the original model with `staticllm export`"
        )


def build_tokenizer(header: GGUFHeader) -> tuple[ov.Model, ov.Model]:
    """Return the tokenizer and the detokenizer of a file, with its chat template.

    Raises ``ModelError`` (the vocabulary is missing, damaged, or of a kind that is not known).
    """
    from openvino_tokenizers.tokenizer_pipeline import TokenizerPipeline
    from openvino_tokenizers.utils import change_inputs_type, change_outputs_type

    check_vocabulary(header)
    steps_of = {BYTE_PAIRS: _byte_pairs, SCORED_PAIRS: _scored_pairs}[header.text(KIND)]
    special = special_tokens(header)
    vocabulary = _vocabulary(header)
    pipeline = TokenizerPipeline()
    for step in steps_of(header, vocabulary, special):
        pipeline.add_steps(step)
        pipeline.vocab = getattr(step, "vocab", None) or pipeline.vocab
    tokenizer = pipeline.get_tokenizer_ov_subgraph()
    detokenizer = pipeline.get_detokenizer_ov_subgraph()
    for model in (tokenizer, detokenizer):
        _describe(model, header, special)
    return change_outputs_type(tokenizer, ov.Type.i64), change_inputs_type(detokenizer, ov.Type.i64)


def _describe(model: ov.Model, header: GGUFHeader, special: SpecialTokens) -> None:
    """Store the special tokens and the chat template where GenAI's tokenizer reads them.

    Without the versions, it would not let a caller keep special tokens in a text.
    """
    from openvino_tokenizers.utils import update_rt_info_with_environment

    update_rt_info_with_environment(model)
    values = {"bos_token_id": special.bos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    for name, value in {**values, "chat_template": header.text(TEMPLATE) or None}.items():
        if value is not None:
            model.set_rt_info(value, name)


def _byte_pairs(header: GGUFHeader, vocabulary: _Vocabulary, special: SpecialTokens) -> Iterator[BasePipelineStep]:
    """Yield the steps of a tokenizer that merges pairs of bytes, and of its detokenizer."""
    from openvino_tokenizers import tokenizer_pipeline as steps
    from openvino_tokenizers.utils import apply_unicode_to_bytes

    pre = header.text(PRE, "default")
    added = vocabulary.of_type(CONTROL, USER_DEFINED)
    yield steps.SpecialTokensSplit.from_string_iter(added)
    if pre in _NFC:
        yield steps.NormalizeUnicode("NFC")
    for pattern in SPLITS[pre]:
        yield steps.RegexSplitStep(pattern, behaviour="isolate", mergeable=False)
    yield steps.BytesToCharsStep()
    yield steps.BPETokenizationStep(_distinct(vocabulary.tokens), _merges(header), added_tokens=added)
    yield from _ends_of_text(header, special, is_begun=False)
    texts: Any = [apply_unicode_to_bytes(token, return_corrupted_tokens=True) for token in vocabulary.tokens]
    for text, place in added.items():
        texts[place] = text.encode()
    yield steps.VocabDecoderStep(texts, sorted(vocabulary.of_type(CONTROL).values()))
    yield steps.CharsToBytesStep()
    yield steps.UTF8ValidateStep(mode=_replace_mode())


def _distinct(tokens: Sequence[str]) -> list[str]:
    """Return the tokens with other texts for all but the last of those that have the same, so that texts become the last."""
    last = {token: place for place, token in enumerate(tokens)}
    return [token if last[token] == place else f"{token}\ufffd{place}" for place, token in enumerate(tokens)]


def _merges(header: GGUFHeader) -> list[str]:
    """Return the pairs to merge. Raises ``ModelError`` (they are missing, or one makes what is no token)."""
    merges = header.metadata.get(MERGES)
    if not isinstance(merges, list) or any(each.count(" ") != 1 for each in merges):
        raise ModelError(f"{str(header.path)!r} has no pairs to merge, or damaged ones ({MERGES}): download it again")
    known = set(_tokens(header))
    other = next((each for each in merges if not known.issuperset((*each.split(" "), each.replace(" ", "")))), None)
    if other is not None:
        raise ModelError(
            f"{str(header.path)!r} merges {shown(other)} to what is no token ({MERGES}): download it again"
        )
    return merges


def _scored_pairs(header: GGUFHeader, vocabulary: _Vocabulary, special: SpecialTokens) -> Iterator[BasePipelineStep]:
    """Yield the steps of a tokenizer that merges pairs by their scores, as SentencePiece does, and of its detokenizer."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    added = vocabulary.of_type(CONTROL, USER_DEFINED)
    begins_with_space = _flag(header, ADD_SPACE, True)
    yield steps.SpecialTokensSplit.from_string_iter(added)
    if begins_with_space:
        yield steps.RegexNormalizationStep.prepend_regex(_SPACE)
    yield steps.RegexNormalizationStep(" ", _SPACE)
    scores = header.metadata.get(SCORES)
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{str(header.path)!r} has no score for each of its tokens ({SCORES}): download it again")
    merges: Any = pairs_by_score(vocabulary.tokens, scores)
    unknown = vocabulary.tokens[header.number("tokenizer.ggml.unknown_token_id") or 0]
    yield steps.BPETokenizationStep(
        _distinct(vocabulary.tokens),
        merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
        added_tokens=added,
    )
    yield from _ends_of_text(header, special, is_begun=True)
    yield steps.VocabDecoderStep(None, sorted(vocabulary.of_type(CONTROL).values()))
    yield steps.RegexDecodingStep.replace_sp_spaces()
    yield steps.ByteFallbackStep()
    yield steps.FuseStep()
    if begins_with_space:
        yield steps.RegexDecodingStep.strip_forward_space()
    yield steps.UTF8ValidateStep(mode=_replace_mode())


def pairs_by_score(tokens: Sequence[str], scores: np.ndarray[Any, Any]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are tokens together, in the order in which SentencePiece merges them: by score."""
    places = {token: place for place, token in enumerate(tokens)}
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for place, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left = places.get(token[:cut])
            right = places.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[place], left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(found)]


def _ends_of_text(header: GGUFHeader, special: SpecialTokens, *, is_begun: bool) -> Iterator[BasePipelineStep]:
    """Yield the steps that add the tokens at both ends of a text and pad several to one length."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    inputs: list[Any] = [steps.Sequence()]
    if _flag(header, ADD_BOS, is_begun) and special.bos is not None:
        inputs.insert(0, steps.AddToken(_token_id=special.bos))
    if _flag(header, ADD_EOS, False) and special.eos is not None:
        inputs.append(steps.AddToken(_token_id=special.eos))
    yield steps.TruncationStep(max_length=np.iinfo(np.int32).max - len(inputs))  # GenAI adds the others' number to it
    yield steps.CombineSegmentsStep(inputs)
    pad = special.pad if special.pad is not None else special.eos
    yield steps.PaddingStep(_token_id=pad or 0, pad_right=False)


def _replace_mode() -> Any:
    from openvino_tokenizers.constants import UTF8ReplaceMode

    return UTF8ReplaceMode.REPLACE
