"""Holds timings behind openvino_genai's getters: means and standard deviations in ms, throughput in tokens per second."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

MICRO = 1e6


class MeanStdPair(NamedTuple):
    """A mean and a standard deviation; both are -1 if nothing was measured, as in GenAI."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: list[float]) -> MeanStdPair:
        """Return the mean and the population standard deviation of ``values``."""
        if not values:
            return cls(-1.0, -1.0)
        return cls(statistics.fmean(values), statistics.pstdev(values))


class SummaryStats(NamedTuple):
    """Mean, standard deviation, minimum and maximum; all are -1 if nothing was measured."""

    mean: float = -1.0
    std: float = -1.0
    min: float = -1.0
    max: float = -1.0

    def as_tuple(self) -> tuple[float, float, float, float]:
        """Return ``(mean, std, min, max)``."""
        return self.mean, self.std, self.min, self.max


@dataclass
class RawPerfMetrics:
    """Single measurements, with durations in microseconds: one entry per request, or per token if the comment starts so."""

    generate_durations: list[float] = field(default_factory=list)
    tokenization_durations: list[float] = field(default_factory=list)
    detokenization_durations: list[float] = field(default_factory=list)
    m_times_to_first_token: list[float] = field(default_factory=list)
    m_durations: list[float] = field(default_factory=list)  # per token after the first: time since the previous one
    m_new_token_times: list[float] = field(default_factory=list)  # per token: moment of perf_counter, in ms
    m_batch_sizes: list[int] = field(default_factory=list)
    token_infer_durations: list[float] = field(default_factory=list)  # per token after the first: its device call
    inference_durations: list[float] = field(default_factory=list)  # all device calls of a request
    sampling_durations: list[float] = field(default_factory=list)  # per token: choosing it
    chat_template_durations: list[float] = field(default_factory=list)
    grammar_compile_times: list[float] = field(default_factory=list)  # per request with a grammar


class PerfMetrics:
    """The timings of one or more requests; the sum of two objects pools their requests."""

    def __init__(self, load_time_ms: float = 0.0, raw: RawPerfMetrics | None = None) -> None:
        self._load_time = load_time_ms
        self.raw_metrics = raw or RawPerfMetrics()
        self._num_input_tokens = 0
        self._num_generated_tokens = 0
        self._num_cached_tokens = 0
        self._num_recomputed_tokens = 0
        self._draft_durations: list[float] = []  # microseconds per drafted token
        self._num_drafted_tokens = 0
        self._num_accepted_tokens = 0
        self._grammar_init_ms: dict[str, float] = {}  # by the compiler's name
        self.may_draft = False  # whether a draft model could draft the tokens

    def count(self, num_input: int, num_generated: int, num_cached: int, num_recomputed: int = 0) -> None:
        """Add the token counts of one request."""
        self._num_input_tokens += num_input
        self._num_generated_tokens += num_generated
        self._num_cached_tokens += num_cached
        self._num_recomputed_tokens += num_recomputed

    def count_drafts(
        self, num_drafted: int, num_accepted: int, seconds: Sequence[float] = (), may_draft: bool = False
    ) -> None:
        """Add the drafted tokens that were checked for one request, how many of them were accepted, and how long each took.

        Args:
            may_draft: Whether a draft model could draft them.
        """
        self.may_draft |= may_draft
        self._draft_durations += [value * MICRO for value in seconds]
        self._num_drafted_tokens += num_drafted
        self._num_accepted_tokens += num_accepted

    def count_grammar(self, seconds: float, init_seconds: Mapping[str, float]) -> None:
        """Add the time that the grammar of one request took to compile, and that of the compilers' preparation, by name."""
        self.raw_metrics.grammar_compile_times.append(seconds * MICRO)
        self._grammar_init_ms |= {name: value * 1e3 for name, value in init_seconds.items()}

    def get_load_time(self) -> float:
        """Return the time to load the model until it can serve requests, ms."""
        return self._load_time

    def get_num_input_tokens(self) -> int:
        """Return the number of prompt tokens, including those of the chat template."""
        return self._num_input_tokens

    def get_num_generated_tokens(self) -> int:
        """Return the number of tokens of all answers."""
        return self._num_generated_tokens

    def get_num_cached_tokens(self) -> int:
        """Return the number of prompt tokens whose KV slots came from the prefix cache."""
        return self._num_cached_tokens

    def get_num_recomputed_tokens(self) -> int:
        """Return the number of tokens that ran again because a text became so long that the model takes other RoPE factors."""
        return self._num_recomputed_tokens

    def get_num_draft_tokens(self) -> int:
        """Return the number of drafted tokens that were checked, by prompt lookup or by a draft model."""
        return self._num_drafted_tokens

    def get_num_accepted_tokens(self) -> int:
        """Return the number of drafted tokens that became part of an answer."""
        return self._num_accepted_tokens

    def draft_metrics(self) -> PerfMetrics:
        """Return the timings of the drafts: each drafted token counts as a generated one."""
        durations = self._draft_durations
        generated = self.raw_metrics.generate_durations
        raw = RawPerfMetrics(
            generate_durations=list(generated),
            m_times_to_first_token=durations[:1],
            m_durations=durations[1:],
            token_infer_durations=durations[1:],
            inference_durations=[sum(durations)] if durations else [],
            m_batch_sizes=[1] * len(durations),
        )
        metrics = PerfMetrics(self._load_time, raw)
        metrics.count(self._num_input_tokens, len(durations), 0)
        return metrics

    def get_ttft(self) -> MeanStdPair:
        """Return the time to first token, ms: from the call to the first token, including tokenization."""
        return self._ms("m_times_to_first_token")

    def get_tpot(self) -> MeanStdPair:
        """Return the time per output token after the first, ms."""
        return self._ms("m_durations")

    def get_ipot(self) -> MeanStdPair:
        """Return the device time per output token after the first, ms."""
        return self._ms("token_infer_durations")

    def get_throughput(self) -> MeanStdPair:
        """Return the decoding speed in tokens per second, derived from TPOT."""
        mean = self.get_tpot()
        if mean.mean <= 0:
            return MeanStdPair(-1.0, -1.0)
        return MeanStdPair(1e3 / mean.mean, 1e3 * mean.std / mean.mean**2)

    def get_generate_duration(self) -> MeanStdPair:
        """Return the time from the call to the end of the answer, ms."""
        return self._ms("generate_durations")

    def get_inference_duration(self) -> MeanStdPair:
        """Return the device time of a request, ms."""
        return self._ms("inference_durations")

    def get_tokenization_duration(self) -> MeanStdPair:
        """Return the time to tokenize a prompt, ms."""
        return self._ms("tokenization_durations")

    def get_detokenization_duration(self) -> MeanStdPair:
        """Return the time to decode an answer's tokens into text, ms."""
        return self._ms("detokenization_durations")

    def get_sampling_duration(self) -> MeanStdPair:
        """Return the time to choose a token from its logits, ms."""
        return self._ms("sampling_durations")

    def get_chat_template_duration(self) -> MeanStdPair:
        """Return the time to render the chat template, ms, which tokenization does not include; -1 without a template."""
        return self._ms("chat_template_durations")

    def get_grammar_compile_time(self) -> SummaryStats:
        """Return the time to compile a grammar, ms; one that was compiled before takes less. -1 without a grammar."""
        values = [value / 1e3 for value in self.raw_metrics.grammar_compile_times]
        return SummaryStats(*MeanStdPair.of(values), min(values), max(values)) if values else SummaryStats()

    def get_grammar_compiler_init_times(self) -> dict[str, float]:
        """Return the time to prepare the compiler of grammars for the model's tokens, ms, by the name of its library."""
        return dict(self._grammar_init_ms)

    def get_ttst(self) -> MeanStdPair:
        """Return the time from the first token to the second, ms."""
        return MeanStdPair.of([value / 1e3 for value in self.raw_metrics.m_durations[:1]])

    def get_latency(self) -> MeanStdPair:
        """Return the time per token after the second, ms."""
        return MeanStdPair.of([value / 1e3 for value in self.raw_metrics.m_durations[1:]])

    @property
    def _token_counts(self) -> tuple[int, int, int, int]:
        counts = self._num_input_tokens, self._num_generated_tokens
        return *counts, self._num_cached_tokens, self._num_recomputed_tokens

    def _ms(self, name: str) -> MeanStdPair:
        return MeanStdPair.of([value / 1e3 for value in getattr(self.raw_metrics, name)])

    def __add__(self, other: PerfMetrics) -> PerfMetrics:
        raw = RawPerfMetrics(
            **{
                item.name: getattr(self.raw_metrics, item.name) + getattr(other.raw_metrics, item.name)
                for item in fields(RawPerfMetrics)
            }
        )
        pooled = PerfMetrics(self._load_time, raw)
        for part in (self, other):
            pooled.count(*part._token_counts)
            seconds = [value / MICRO for value in part._draft_durations]
            pooled.count_drafts(part._num_drafted_tokens, part._num_accepted_tokens, seconds, part.may_draft)
            pooled._grammar_init_ms |= part._grammar_init_ms
        return pooled


class SpeculativePerfMetrics(PerfMetrics):
    """The timings of requests whose tokens were drafted: those of the answer, and by model.

    ``main_model_metrics`` are those of the answer, too. ``draft_model_metrics`` has one token per drafted token, which took its
    share of the draft model's time; 0 with prompt lookup.
    """

    def __init__(self, answer: PerfMetrics) -> None:
        super().__init__(answer.get_load_time(), answer.raw_metrics)
        self.count(*answer._token_counts)
        seconds = [value / MICRO for value in answer._draft_durations]
        self.count_drafts(answer.get_num_draft_tokens(), answer.get_num_accepted_tokens(), seconds)
        self._grammar_init_ms = dict(answer._grammar_init_ms)
        self.main_model_metrics = answer
        self.draft_model_metrics = answer.draft_metrics()

    def get_num_rejected_tokens(self) -> int:
        """Return the number of drafted tokens that were checked and not accepted."""
        return self.get_num_draft_tokens() - self.get_num_accepted_tokens()

    def get_num_draft_processed_tokens(self) -> int:
        """Return the number of drafted tokens that a draft model computed; prompt lookup computes none."""
        return sum(value > 0 for value in self._draft_durations)

    def get_draft_acceptance_rate(self) -> float:
        """Return the share of drafted tokens that were accepted."""
        return _share(self.get_num_accepted_tokens(), self.get_num_draft_tokens())

    def get_draft_processed_to_candidate_ratio(self) -> float:
        """Return the number of tokens that a draft model computed per token that was checked."""
        return _share(self.get_num_draft_processed_tokens(), self.get_num_draft_tokens())

    def get_draft_to_main_inference_duration_ratio(self) -> float:
        """Return the time of the draft model, divided by the device time of the model."""
        return _share(sum(self._draft_durations), sum(self.raw_metrics.inference_durations))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
