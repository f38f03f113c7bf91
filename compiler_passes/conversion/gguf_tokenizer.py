"""Makes a tokenizer and a detokenizer of the vocabulary in a GGUF file, as ``openvino_tokenizers`` makes them of others.

Two kinds of vocabularies are known, which nearly all chat models have: pairs of bytes (``gpt2``), whose texts are split by
regular expressions that ``tokenizer.ggml.pre`` names, and SentencePiece's pairs with scores (``llama``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov

from staticllm.errors import ModelError, quoted, shown
from staticllm.model_files.gguf_architectures import ARCHITECTURES
from staticllm.model_files.gguf_header import GGUFHeader

from .gguf_merges import Pair, impossible, live_pairs, merged, pairs_by_score

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
TOOL_USE = "tool_use"
"""The name of the chat template for conversations with tools."""
BYTE_PAIRS, SCORED_PAIRS = "gpt2", "llama"
"""Values of ``tokenizer.ggml.model``."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of ``tokenizer.ggml.token_type``."""
_NO_ID = frozenset((-1, 2**32 - 1, 2**64 - 1))
"""Ids that stand for none, in the types of numbers that files have."""
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
_LOOKS_SPECIAL = re.compile(r"<\|.+\|>")
"""Tokens that are special in a file that does not say which are."""
_KEEPS_SPACES = "<|endoftext|>"
"""The one that begins no turn: spaces behind it are text, also where those behind others are not."""
_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_MARKS = "\ufdd0", "\ufdd1"
"""Characters that are in no text (Unicode 23.7): around words that are tokens as a whole."""
_UNKNOWN_LETTER = "\ufdd2"
"""Another of them: in place of letters that are no tokens."""
_NO_LETTERS = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
"""Bytes that are in no UTF-8."""
_MOST_RANGES = 4000
_WORDS_PER_PATTERN = 500
"""Patterns have at most 64 KiB after they are compiled."""
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_BY_THREE, _BY_ONE = (_CASELESS.format(digits=digits) for digits in ("{1,3}", ""))
_BY_LINE = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_BY_SIGN = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"""
    r"|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?((?=[\p{{L}}])([^a-z]))*((?=[\p{{L}}])([^A-Z]))+{ends}|[^\r\n\p{{L}}\p{{N}}]?((?=[\p{{L}}])([^a-z]))+"
    r"((?=[\p{{L}}])([^A-Z]))*{ends}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "mpt", "olmo", "exaone4", "gigachat"), (_WORDS,)
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_DIGIT, _WORDS)
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "smaug-bpe", "dbrx", "lfm2"),
        (_BY_THREE,),
    ),
    **dict.fromkeys(("chatglm-bpe", "glm4", "olmo2"), (_BY_THREE,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), (_BY_ONE,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_CASED.format(digits="{1,3}", ends=_ENDS),)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BY_LINE,)),
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3"), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _BY_SIGN)),
    "tekken": (_CASED.format(digits="", ends=""),),
}
"""The regular expressions, one after another, by which texts are split before pairs are merged."""
_NFC = frozenset(("qwen2", "deepseek-r1-qwen", "megrez"))
"""Splits before which text is normalised to NFC."""
_WHOLE = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"))
"""Splits behind which a word that is a token is that token, whatever pairs make of it; a text begins there if no key says it."""


@dataclass(frozen=True)
class GGUFSpecialTokens:
    """The ids of the tokens that begin and end texts; None without one."""

    bos: int | None
    eos: int | None
    pad: int | None
    ends: tuple[int, ...]
    """All that end a turn."""


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file, and which of them are found in texts as they are."""

    tokens: list[str]
    types: np.ndarray[Any, Any]

    def of_type(self, *types: int) -> dict[str, int]:
        return {self.tokens[place]: int(place) for place in np.flatnonzero(np.isin(self.types, types))}

    @cached_property
    def added(self) -> dict[str, int]:
        """The tokens that are found in texts before anything else."""
        found = self.of_type(UNKNOWN, CONTROL, USER_DEFINED)
        return {text: place for text, place in found.items() if text}

    @cached_property
    def words(self) -> dict[str, int]:
        """All other tokens, of equal texts the last."""
        is_added = np.isin(self.types, (UNKNOWN, CONTROL, USER_DEFINED))
        return {token: place for place, token in enumerate(self.tokens) if token and not is_added[place]}

    def texts(self, words: Mapping[str, bytes]) -> list[bytes]:
        """Return by what each token is found: added ones and some of the words; all others by what is in no text."""
        found = [impossible(place) for place in range(len(self.tokens))]
        for token, text in words.items():
            found[self.words[token]] = text
        for token, place in self.added.items():
            found[place] = token.encode()
        return found


def special_tokens(header: GGUFHeader) -> GGUFSpecialTokens:
    """Return the special tokens.

    Raises:
        ModelError: an id is not in the vocabulary.
    """
    tokens = _tokens(header)
    bos, eos = (_id(header, what, len(tokens)) for what in ("bos", "eos"))
    pad, eot, eom = (_optional_id(header, what, len(tokens)) for what in ("padding", "eot", "eom"))
    known = _vocabulary(header).of_type(CONTROL, USER_DEFINED)
    texts = ENDS if eos is not None else (*ENDS, *ENDS_OF_TEXT)
    others = (known[text] for text in texts if text in known)
    ends = tuple(dict.fromkeys(each for each in (eos, eot, eom, *others) if each is not None))
    return GGUFSpecialTokens(bos, eos if eos is not None else next(iter(ends), None), pad, ends)


def _id(header: GGUFHeader, what: str, num_tokens: int) -> int | None:
    """Return the id of a special token; None without one."""
    key = f"tokenizer.ggml.{what}_token_id"
    value = header.metadata.get(key)
    number = header.number(key)
    if value is None or number in _NO_ID:
        return None
    if number is None or not 0 <= number < num_tokens:
        raise ModelError(f"{quoted(header.path)} has {key} {shown(value)}, and {num_tokens} tokens: download it again")
    return number


def _optional_id(header: GGUFHeader, what: str, num_tokens: int) -> int | None:
    """Return the id of a token that nothing needs; None also if it is no id of the vocabulary, as llama.cpp does."""
    number = header.number(f"tokenizer.ggml.{what}_token_id")
    return number if number is not None and 0 <= number < num_tokens else None


def _flag(header: GGUFHeader, key: str, default: bool) -> bool:
    """Return a setting.

    Raises:
        ModelError: it is neither true nor false.
    """
    value = header.metadata.get(key, default)
    if not isinstance(value, int) or value not in (0, 1):
        raise ModelError(
            f"{quoted(header.path)} has {key} {shown(value)}, which must be true or false: download it again"
        )
    return bool(value)


def _tokens(header: GGUFHeader) -> list[str]:
    tokens = header.metadata.get(TOKENS)
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{quoted(header.path)} has no vocabulary ({TOKENS}): it is no language model")
    return tokens


def _vocabulary(header: GGUFHeader) -> _Vocabulary:
    """Return the tokens and their types. Those that begin and end texts are control tokens, whatever the file says."""
    tokens = _tokens(header)
    types = header.metadata.get(TYPES)
    if types is None:
        types = np.array([CONTROL if _LOOKS_SPECIAL.fullmatch(token) else NORMAL for token in tokens])
    if not isinstance(types, np.ndarray) or len(types) < len(tokens):
        raise ModelError(f"{quoted(header.path)} has {len(tokens)} tokens and other types of them: download it again")
    types = types[: len(tokens)].copy()
    ids = [_id(header, what, len(tokens)) for what in ("bos", "eos")]
    ids += [_optional_id(header, what, len(tokens)) for what in ("eot", "eom")]
    types[[place for place in ids if place is not None]] = CONTROL
    for place, token in enumerate(tokens):
        if token in ENDS and types[place] != USER_DEFINED:
            types[place] = CONTROL
    if not np.isin(types, (CONTROL, USER_DEFINED)).any():
        raise ModelError(f"{quoted(header.path)} does not say which token ends a text ({TYPES}): download it again")
    return _Vocabulary(tokens, types)


def check_vocabulary(header: GGUFHeader) -> None:
    """Check that the vocabulary can be read.

    Raises:
        ModelError: it is missing, or of another kind.
    """
    _vocabulary(header)
    kind = header.text(KIND)
    if kind not in (BYTE_PAIRS, SCORED_PAIRS):
        raise ModelError(
            f"{quoted(header.path)} has a vocabulary of the kind {shown(kind)}, and {BYTE_PAIRS} and {SCORED_PAIRS} can be "
            "read: export the original model with `staticllm export`"
        )
    if kind == BYTE_PAIRS:
        split_of(header)


def split_of(header: GGUFHeader) -> str:
    """Return how texts are split.

    Raises:
        ModelError: the file does not say it, or it is not known.
    """
    pre = header.text(PRE)
    known = ARCHITECTURES.get(header.architecture)
    if not pre and known is not None and known.split:
        return known.split
    if not pre:
        raise ModelError(
            f"{quoted(header.path)} does not say how texts are split ({PRE} is missing), and models of the architecture "
            f"{shown(header.architecture)} do it in several ways: download a newer file of this model"
        )
    if pre not in SPLITS:
        raise ModelError(
            f"{quoted(header.path)} splits texts in a way that is not known ({PRE} is {shown(pre)}): "
            "export the original model with `staticllm export`"
        )
    return pre


def assumed(header: GGUFHeader) -> list[str]:
    """Return what a file does not say and is taken of its architecture, each in a line."""
    if header.text(KIND) != BYTE_PAIRS or header.text(PRE):
        return []
    return [
        f"{quoted(header.path)} does not say how texts are split ({PRE} is missing): they are split as {split_of(header)} "
        f"does, as in all models of the architecture {shown(header.architecture)}"
    ]


def build_tokenizer(header: GGUFHeader) -> tuple[ov.Model, ov.Model]:
    """Return the tokenizer and the detokenizer of a file, with its chat template.

    Raises:
        ModelError: the vocabulary is missing, damaged, or of a kind that is not known.
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
    tokenizer = pipeline.get_tokenizer_ov_subgraph()
    detokenizer = pipeline.get_detokenizer_ov_subgraph()
    for model in (tokenizer, detokenizer):
        _describe(model, header, special)
    return change_outputs_type(tokenizer, ov.Type.i64), change_inputs_type(detokenizer, ov.Type.i64)


def _describe(model: ov.Model, header: GGUFHeader, special: GGUFSpecialTokens) -> None:
    """Store the special tokens and the chat template where GenAI's tokenizer reads them.

    Without the versions, it would not let a caller keep special tokens in a text.
    """
    from openvino_tokenizers.utils import update_rt_info_with_environment

    update_rt_info_with_environment(model)
    values = {"bos_token_id": special.bos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    for name, value in {**values, "chat_template": _template(header) or None}.items():
        if value is not None:
            model.set_rt_info(value, name)


def _template(header: GGUFHeader) -> str:
    """Return the chat template; one with a name if there is no other."""
    names = ("", ".default", f".{TOOL_USE}")
    return next((text for name in names if (text := header.text(f"{TEMPLATE}{name}"))), "")


def tool_templates(header: GGUFHeader) -> list[dict[str, str]]:
    """Return both chat templates as ``tokenizer_config.json`` lists them, if conversations with tools have their own."""
    found = {"default": _template(header), TOOL_USE: header.text(f"{TEMPLATE}.{TOOL_USE}")}
    is_own = found[TOOL_USE] not in ("", found["default"])
    return [{"name": name, "template": text} for name, text in found.items()] if is_own else []


def _byte_pairs(header: GGUFHeader, vocabulary: _Vocabulary, special: GGUFSpecialTokens) -> Iterator[BasePipelineStep]:
    """Yield the steps of a tokenizer that merges pairs of bytes, and of its detokenizer."""
    from openvino_tokenizers import tokenizer_pipeline as steps
    from openvino_tokenizers.utils import apply_unicode_to_bytes

    pre = split_of(header)
    yield steps.SpecialTokensSplit.from_string_iter(vocabulary.added)
    if pre in _NFC:
        yield steps.NormalizeUnicode("NFC")
    for pattern in SPLITS[pre]:
        yield steps.RegexSplitStep(pattern, behaviour="isolate", mergeable=False)
    texts = {token: apply_unicode_to_bytes(token) for token in vocabulary.words}
    taken = {b"", *(text.encode() for text in vocabulary.added)}
    words = {token: text for token, text in texts.items() if text not in taken}
    letters = [token for token in words if len(token) == 1]
    pairs = live_pairs(_merges(header), letters, texts.keys() - words.keys())
    wholes = _wholes(words, pairs) if pre in _WHOLE else []
    yield from _marks_around(wholes)
    yield _merging(
        vocabulary.texts({token: words[token] for token in (*letters, *map("".join, pairs))}),
        [(words[left], words[right]) for left, right in pairs],
        {word.join(_MARKS).encode(): vocabulary.words[token] for token, word in wholes},
    )
    yield from _ends_of_text(header, special, is_begun=pre in _WHOLE)
    own: Any = [apply_unicode_to_bytes(token, return_corrupted_tokens=True) for token in vocabulary.tokens]
    for text, place in vocabulary.added.items():
        own[place] = text.encode()
    yield steps.VocabDecoderStep(own, sorted(vocabulary.of_type(CONTROL).values()))
    yield steps.FuseStep()
    yield steps.UTF8ValidateStep(mode=_replace_mode())


def _wholes(words: Mapping[str, bytes], pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Return the tokens that pairs do not make of their own text, and their texts."""
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    found = []
    for token, text in words.items():
        if len(merged(token, ranks)) > 1:
            try:
                found.append((token, text.decode()))
            except UnicodeDecodeError:  # a part of a letter is no word
                continue
    return found


def _marks_around(wholes: Sequence[tuple[str, str]]) -> Iterator[BasePipelineStep]:
    """Yield the steps that put marks around words that are tokens as a whole."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    class Marks(steps.PreTokenizatinStep):  # type: ignore[misc]  # the library has no types
        """A normalisation of the parts of a text, for which the library has no step."""

        def __init__(self, words: Sequence[str]) -> None:
            alternatives = "|".join(map(re.escape, words))
            self.marks = steps.RegexNormalizationStep(rf"\A({alternatives})\z", "$1".join(_MARKS))

        def get_ov_subgraph(self, *input_nodes: Any) -> Any:
            (nodes,) = input_nodes
            return nodes[:2] + self.marks.get_ov_subgraph(nodes[2:])

    for begin in range(0, len(wholes), _WORDS_PER_PATTERN):
        yield Marks([word for _, word in wholes[begin : begin + _WORDS_PER_PATTERN]])


def _merging(texts: list[bytes], pairs: list[tuple[bytes, bytes]], more: dict[bytes, int]) -> BasePipelineStep:
    """Return the step that merges pairs. ``more``: further texts of tokens."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    step: Any = steps.BPETokenizationStep(texts, pairs, added_tokens=more)
    step.finalize = lambda: None  # it would take from tokens with further texts their own
    return step


def _merges(header: GGUFHeader) -> list[Pair]:
    """Return the pairs to merge.

    Raises:
        ModelError: they are missing, or one makes what is no token.
    """
    merges = header.metadata.get(MERGES)
    if not isinstance(merges, list) or any(each.count(" ") != 1 for each in merges):
        raise ModelError(f"{quoted(header.path)} has no pairs to merge, or damaged ones ({MERGES}): download it again")
    known = set(_tokens(header))
    other = next((each for each in merges if not known.issuperset((*each.split(" "), each.replace(" ", "")))), None)
    if other is not None:
        raise ModelError(
            f"{quoted(header.path)} merges {shown(other)} to what is no token ({MERGES}): download it again"
        )
    return [(left, right) for left, _, right in (each.partition(" ") for each in merges)]


def _scored_pairs(
    header: GGUFHeader, vocabulary: _Vocabulary, special: GGUFSpecialTokens
) -> Iterator[BasePipelineStep]:
    """Yield the steps of a tokenizer that merges pairs by their scores, as SentencePiece does, and of its detokenizer."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    begins_with_space = _flag(header, ADD_SPACE, True)
    stripping = _stripping(header, vocabulary)
    added = [steps.SpecialToken(text, strip_right=text in stripping) for text in vocabulary.added]
    yield steps.SpecialTokensSplit(added)
    if begins_with_space:
        yield steps.RegexNormalizationStep.prepend_regex(_SPACE)
    yield steps.RegexNormalizationStep(" ", _SPACE)
    scores = header.metadata.get(SCORES)
    if not isinstance(scores, np.ndarray) or len(scores) < len(vocabulary.tokens):
        raise ModelError(f"{quoted(header.path)} has no score for each of its tokens ({SCORES}): download it again")
    known = {token: token.encode() for token in vocabulary.words if token not in vocabulary.added}
    codes = {token: bytes.fromhex(match[1]) for token in known if (match := _BYTE.fullmatch(token))}
    letters = [token for token in known if len(token) == 1]
    spaced = {token for token in vocabulary.added if _SPACE in token}  # no text has them before spaces are replaced
    parts = spaced | (known.keys() - codes.keys())
    mergeable = [token if token in parts else "" for token in vocabulary.tokens]
    pairs = live_pairs(pairs_by_score(mergeable, scores), letters)
    found = {token: known[token] for token in (*letters, *map("".join, pairs)) if token in known}
    found |= {token: code for token, code in codes.items() if code not in found.values()}
    unknown = _unknown(header, vocabulary)
    yield from _replacing_unknown(letters, set(codes.values()))
    yield _merging(
        vocabulary.texts(found),
        [(left.encode(), right.encode()) for left, right in pairs],
        {_UNKNOWN_LETTER.encode(): unknown},
    )
    yield from _ends_of_text(header, special, is_begun=True)
    yield steps.VocabDecoderStep(list(vocabulary.tokens), sorted(vocabulary.of_type(CONTROL).values()))
    yield steps.RegexDecodingStep.replace_sp_spaces()
    yield steps.ByteFallbackStep()
    yield steps.FuseStep()
    if begins_with_space:
        yield steps.RegexDecodingStep.strip_forward_space()
    yield steps.UTF8ValidateStep(mode=_replace_mode())


def _stripping(header: GGUFHeader, vocabulary: _Vocabulary) -> set[str]:
    """Return the tokens behind which spaces are no text: the original's say so, and files of its architecture do not."""
    known = ARCHITECTURES.get(header.architecture)
    if known is None or not known.strips_markers:
        return set()
    markers = {text for text in vocabulary.added if _LOOKS_SPECIAL.fullmatch(text)} - {_KEEPS_SPACES}
    return markers | vocabulary.added.keys() & set(ENDS_OF_TEXT)


def _unknown(header: GGUFHeader, vocabulary: _Vocabulary) -> int:
    """Return the id of the token for unknown letters."""
    own = _optional_id(header, "unknown", len(vocabulary.tokens))
    return next(iter(vocabulary.of_type(UNKNOWN).values()), 0) if own is None else own


def _replacing_unknown(letters: Sequence[str], codes: Set[bytes]) -> Iterator[BasePipelineStep]:
    """Yield the step that makes one letter of those in a row that are neither tokens nor have tokens for all bytes."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    numbers = {ord(letter) for letter in letters} | {ord(code) for code in codes if code < b"\x80"}
    needed = {bytes([byte]) for byte in set(range(256)) - _NO_LETTERS if byte > 0x7F or byte not in numbers}
    if needed <= codes:
        return
    begins = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    ranges = "".join(rf"\x{{{begin:x}}}-\x{{{end:x}}}" for begin, end in zip(begins, ends, strict=True))
    if len(begins) <= _MOST_RANGES:
        yield steps.RegexNormalizationStep(f"[^{ranges}]+", _UNKNOWN_LETTER)


def _ends_of_text(header: GGUFHeader, special: GGUFSpecialTokens, *, is_begun: bool) -> Iterator[BasePipelineStep]:
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
