"""The one table of options that are numbers: what each may be in a program, over HTTP and from another process.

A row makes the pipeline's check, the field of each HTTP API, the daemon's check and the line in ``docs/reference/options.md``. A
new sampling option is a field of ``SamplingParams`` here, and code that acts on it (``sampler.py`` or ``logits_processors.py``).
An option that is no number is a field of ``ExtraOptions``, which ``read_by`` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, TypeAlias

from staticllm.config import whole
from staticllm.core import MAX_ANSWERS
from staticllm.errors import MAX_LEN, GenerationConfigError, shown

Api: TypeAlias = Literal["openai", "ollama", "responses"]
Edge: TypeAlias = Literal["", "least", "most"]
TokenSequences: TypeAlias = tuple[tuple[int, ...], ...]
UNLIMITED = 2**64 - 1
MAX_BEAMS = 64
ZERO_SEED = 2**63
"""The seed of the engine for a request over HTTP, or of the command line, whose seed is 0: GenAI's 0 is a random one."""


@dataclass(frozen=True)
class OptionRow:
    """One row: a number from ``least`` to ``most``."""

    default: float
    """The value of a request that does not say it; of this type (int or float) every value is."""
    least: float
    most: float
    excluded: Edge = ""
    """The edge that a request that draws tokens may not have."""
    draws: bool = False
    """Whether it has an effect only with ``do_sample=True``."""
    part_of: str = ""
    """The option that it adjusts; by itself it does nothing."""
    has_beams: bool = False
    """Whether beam search has it."""
    apis: tuple[Api, ...] = ("openai",)
    """The HTTP APIs that have it as a field."""
    names: Mapping[Api, tuple[str, ...]] = field(default_factory=dict)
    """The names of that field where it is not the option's own."""
    http: tuple[float, float] | None = None
    """The bounds over HTTP where they are not ``least`` and ``most``."""
    meaning: str = ""
    """What it does, as a sentence of the documentation; "" for an option of GenAI, which documents it."""

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are possible."""
        return isinstance(self.default, int)

    def check(self, name: str, value: object, is_drawn: bool = True) -> float:
        """Return ``value`` as a number of this option.

        Args:
            is_drawn: Whether the request draws tokens.

        Raises:
            ConfigError: it is no whole number, or outside the bounds; the message names both.
            GenerationConfigError: the same of a number that need not be whole.
        """
        if self.is_whole:
            return whole(name, value, int(self.least), int(self.most))
        number = _float(value)
        edge = {"": None, "least": self.least, "most": self.most}[self.excluded if is_drawn else ""]
        if not self.least <= number <= self.most or number == edge:
            least = f"{'more than' if edge == self.least else 'from'} {self.least:g}"
            most = f"{'less than' if edge == self.most else 'up to'} {self.most:g}"
            raise GenerationConfigError(f"{name}={shown(value)}: must be a number {least}, {most}")
        return number

    def http_bounds(self) -> dict[str, float]:
        """Return the bounds over HTTP by their names in JSON Schema's short form (``ge``, ``gt``, ``le``, ``lt``)."""
        least, most = self.http or (self.least, self.most)
        excluded = "" if self.http else self.excluded
        bounds = {"gt" if excluded == "least" else "ge": least, "lt" if excluded == "most" else "le": most}
        return {name: int(bound) for name, bound in bounds.items()} if self.is_whole else bounds


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _row(default: float, least: float, most: float, **rest: Any) -> Any:
    """Return the field of a dataclass whose default and option are one row."""
    return field(default=default, metadata={"option": OptionRow(default, least, most, **rest)})


@dataclass(frozen=True)
class Reading:
    """How a field of checked options is read."""

    check: Callable[..., Any]
    """Gets the name and the value of the option, and by name the values of ``reads``."""
    option: str = ""
    """The option; the field's name without one."""
    reads: tuple[str, ...] = ()
    chooses: bool = False
    """Whether the option changes which token is chosen, so that beam search cannot have it."""

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options that it reads."""
        return (self.option, *self.reads)

    def value(self, options: Mapping[str, Any]) -> Any:
        """Return the checked value; an option that is not there counts as None."""
        others = ({name: options.get(name) for name in self.reads},) if self.reads else ()
        return self.check(self.option, options.get(self.option), *others)


def read_by(
    check: Callable[..., Any],
    default: Any = MISSING,
    option: str = "",
    reads: tuple[str, ...] = (),
    chooses: bool = False,
    **of_field: Any,
) -> Any:
    """Return the field of a dataclass that is read from an option: that of its name, unless another is named."""
    return field(default=default, metadata={"reading": Reading(check, option, reads, chooses)}, **of_field)


@cache
def readings(kind: type[Any]) -> dict[str, Reading]:
    """Return how the fields of a dataclass are read, by the name of the field."""
    rows = {each.name: each.metadata["reading"] for each in fields(kind) if "reading" in each.metadata}
    return {name: replace(row, option=row.option or name) for name, row in rows.items()}


_ALL: tuple[Api, ...] = ("openai", "ollama", "responses")
_LLAMA: tuple[Api, ...] = ("openai", "ollama")


@dataclass(frozen=True)
class SamplingParams:
    """The parameters that choose tokens, with GenAI's names where it has them, else those of llamacpp or transformers."""

    do_sample: bool = False
    """Whether tokens are drawn; else the most likely one is chosen, and options that draw have no effect."""
    temperature: float = _row(1.0, 0.0, 1e6, excluded="least", draws=True, apis=_ALL, http=(0.0, 100.0))
    top_k: int = _row(0, 0, UNLIMITED, draws=True, apis=_ALL, http=(-1, 2**31 - 1))
    """0 keeps all tokens."""
    top_p: float = _row(1.0, 0.0, 1.0, excluded="least", draws=True, apis=_ALL, http=(0.0, 1.0))
    min_p: float = _row(0.0, 0.0, 1.0, excluded="most", draws=True, apis=_ALL, http=(0.0, 1.0))
    repetition_penalty: float = _row(
        1.0, 1e-3, 1e3, apis=_ALL,
        names={"openai": ("repetition_penalty", "repeat_penalty"), "ollama": ("repeat_penalty",)},
    )  # fmt: skip
    presence_penalty: float = _row(0.0, -2.0, 2.0, apis=_ALL)
    frequency_penalty: float = _row(0.0, -2.0, 2.0, apis=_ALL)
    rng_seed: int = _row(0, 0, UNLIMITED, apis=_ALL, names=dict.fromkeys(_ALL, ("seed",)), http=(-(2**63), 2**63 - 1))
    wants_logprobs: bool = False
    num_top_logprobs: int = 0
    """The most likely tokens whose log-probabilities are told beside the chosen one's."""
    typical_p: float = _row(
        1.0, 0.0, 1.0, excluded="least", draws=True, apis=_LLAMA,
        meaning="Keeps the tokens whose surprise is nearest to the entropy, until they reach this probability.",
    )  # fmt: skip
    xtc_probability: float = _row(
        0.0, 0.0, 1.0, draws=True,
        meaning="With this probability per token, all tokens with at least `xtc_threshold` are dropped except the least "
        "likely of them.",
    )  # fmt: skip
    xtc_threshold: float = _row(
        0.1,
        0.0,
        1.0,
        draws=True,
        part_of="xtc_probability",
        meaning="The probability from which a token is a top choice.",
    )
    mirostat: int = _row(
        0, 0, 2, draws=True, apis=_LLAMA,
        meaning="2 keeps the surprise near `mirostat_tau` bits; 0 is off. It takes the place of `top_k`, `top_p` and `min_p`, "
        "which then have no effect.",
    )  # fmt: skip
    mirostat_tau: float = _row(
        5.0, 0.0, 100.0, excluded="least", draws=True, apis=_LLAMA, part_of="mirostat",
        meaning="The surprise that mirostat aims at, in bits.",
    )  # fmt: skip
    mirostat_eta: float = _row(
        0.1, 0.0, 10.0, draws=True, apis=_LLAMA, part_of="mirostat", meaning="How fast mirostat adapts its limit."
    )
    dry_multiplier: float = _row(
        0.0, 0.0, 1e3,
        meaning="A token that would continue a repetition of n tokens loses "
        "`dry_multiplier * dry_base ** (n - dry_allowed_length)`; 0 is off.",
    )  # fmt: skip
    dry_base: float = _row(1.75, 1.0, 1e3, part_of="dry_multiplier", meaning="The base of that penalty.")
    dry_allowed_length: int = _row(
        2, 1, 1 << 20, part_of="dry_multiplier", meaning="The longest repetition without a penalty, in tokens."
    )
    dry_penalty_last_n: int = _row(
        -1,
        -1,
        1 << 31,
        part_of="dry_multiplier",
        meaning="The number of tokens that are searched; -1 for all, 0 for none.",
    )
    finish_grammar: int = _row(
        1, 0, 1, apis=_ALL, has_beams=True,
        meaning="With a grammar: 1 lets the answer end within its tokens, since only tokens are chosen after which it can; 0 "
        "lets it be cut off.",
    )  # fmt: skip
    no_repeat_ngram_size: int = _row(0, 0, UNLIMITED, apis=())
    dry_breakers: TokenSequences = ()
    """Sequences of token ids."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and a number."""
    bad_words: TokenSequences = ()
    """Sequences of token ids."""

    @property
    def uses_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0


SEQUENCES = ("dry_breakers", "logit_bias", "bad_words")
"""The fields that hold tuples of tuples."""
SAMPLING: Mapping[str, OptionRow] = {
    each.name: each.metadata["option"] for each in fields(SamplingParams) if "option" in each.metadata
}
"""The rows of ``SamplingParams``."""
OPTIONS: Mapping[str, OptionRow] = {
    **SAMPLING,
    "num_return_sequences": OptionRow(1, 1, MAX_ANSWERS, apis=()),
    "best_of": OptionRow(0, 0, MAX_ANSWERS, apis=()),
    "min_new_tokens": OptionRow(0, 0, MAX_LEN, apis=()),
    "num_beams": OptionRow(1, 1, MAX_BEAMS, apis=()),
    "diversity_penalty": OptionRow(0.0, -1e6, 1e6, apis=()),
    "length_penalty": OptionRow(1.0, -1e3, 1e3, apis=()),
    "max_ngram_size": OptionRow(0, 0, UNLIMITED, apis=()),
    "num_assistant_tokens": OptionRow(0, 0, UNLIMITED, apis=()),
    "assistant_confidence_threshold": OptionRow(0.0, 0.0, 1.0, apis=()),
}
"""All rows by the name of the option. Only those of ``SAMPLING`` have fields over HTTP: what reads these looks there."""
assert not any(row.apis for name, row in OPTIONS.items() if name not in SAMPLING)


def http_fields(api: Api) -> dict[str, str]:
    """Return the fields of an HTTP API that are rows of the table: the option of each."""
    return {
        name: option for option, row in OPTIONS.items() if api in row.apis for name in row.names.get(api, (option,))
    }


def markdown() -> str:
    """Return the rows that GenAI does not document, as a table of ``docs/reference/options.md``."""
    lines = ["| option | default | bounds | meaning |", "|---|---|---|---|"]
    for name, row in OPTIONS.items():
        if row.meaning:
            least = f"above {row.least:g}" if row.excluded == "least" else f"{row.least:g}"
            most = (
                f"below {row.most:g}"
                if row.excluded == "most"
                else f"{row.most if row.is_whole else format(row.most, 'g')}"
            )
            meaning = row.meaning + (" Needs `do_sample=True`." if row.draws and not row.part_of else "")
            lines.append(f"| `{name}` | {row.default} | {least} to {most} | {meaning} |")
    return "\n".join(lines)
