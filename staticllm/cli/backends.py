"""What answers ``staticllm run`` and its chat: a pipeline of this process, or a model of a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from staticllm.cli.options import Number, Whole, options_of, value
from staticllm.cli.server_client import ServerClient
from staticllm.pipelines.generation.options.table import ZERO_SEED

if TYPE_CHECKING:
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
    from staticllm.results import DecodedResults, GeneratedText

Message = dict[str, str]
Write = Callable[[str], bool]
"""Takes a piece of an answer, and returns whether the answer should stop."""


@dataclass(frozen=True)
class SamplingFlag:
    """A flag of ``staticllm run``."""

    name: str
    """With underscores."""
    kind: Any
    help: str
    option: str
    """The keyword of ``generate``."""
    field: str
    """The field of a request to a server."""


SAMPLING = (
    SamplingFlag(
        "temperature", Number(0, 1e6), "0 is greedy; without it the model's generation_config.json decides.",
        "temperature", "temperature",
    ),
    SamplingFlag("top_p", Number(0, 1, min_open=True), "Sample from the smallest set with this probability.",
                 "top_p", "top_p"),
    SamplingFlag("top_k", Whole(0), "Sample from this many tokens.", "top_k", "top_k"),
    SamplingFlag(
        "min_p", Number(0, 1, max_open=True), "Sample from tokens with this share of the best one's probability.", "min_p",
        "min_p",
    ),
    SamplingFlag("seed", Whole(0), "Seed for sampling.", "rng_seed", "seed"),
)  # fmt: skip
"""The flags that say how tokens are drawn: a row is the whole of one."""
sampling_options = options_of(*(value(f"--{row.name.replace('_', '-')}", row.kind, row.help) for row in SAMPLING))


@dataclass(frozen=True)
class Answer:
    """An answer with its tokens and times."""

    text: str
    finish_reason: str | None
    figures: Mapping[str, Any]
    """Further keys of the JSON, times in ms; None for unknown ones."""

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``staticllm run --json`` prints."""
        return {"text": self.text, "finish_reason": self.finish_reason, **self.figures}

    def stats(self) -> str:
        """Return tokens and times as one line."""
        found = self.figures
        ttft = "-" if found["ttft_ms"] is None else f"{found['ttft_ms']:.1f} ms"
        parts = [
            f"{found['prompt_tokens']} prompt tokens ({found['cached_tokens']} cached), {found['generated_tokens']} generated "
            f"({self.finish_reason})",
            f"TTFT {ttft}",
        ]
        if "tpot_ms" in found:
            rate = f"{found['tpot_ms']:.2f} ms ({found['tokens_per_second']:.0f} tokens/s)"
            parts.append(f"TPOT {rate if found['tpot_ms'] >= 0 else '-'}")
        parts += [f"{name} {found[f'{name}_ms'] / 1e3:.2f} s" for name in ("load", "total") if f"{name}_ms" in found]
        return " | ".join(parts)


class Backend(Protocol):
    """A model that answers. All methods raise ``StaticLLMError`` if it cannot."""

    def check(self) -> None:
        """Check, before the first question of a chat, that there will be an answer."""

    def answer(self, prompt: str, system: str, write: Write) -> Answer:
        """Answer one prompt after a system message, if that is not empty."""
        ...

    def chat(self, messages: Sequence[Message], write: Write) -> Answer:
        """Answer the last message of a conversation.

        Raises:
            PromptTooLongError: the conversation is too long, and the model says by how much.
        """
        ...


class LocalBackend:
    """A pipeline of this process. ``generation``: the options of ``generate``."""

    def __init__(self, pipe: StaticLLMPipeline, generation: Mapping[str, Any]) -> None:
        self._pipe = pipe
        self._generation = dict(generation)

    def check(self) -> None:
        """Do nothing: the pipeline is loaded."""

    def answer(self, prompt: str, system: str, write: Write) -> Answer:
        if system:
            self._pipe.start_chat(system)
        result = self._pipe.generate(prompt, self._generation, write)
        return Answer(str(result), str(result.finish_reasons[0]), _figures(result))

    def chat(self, messages: Sequence[Message], write: Write) -> Answer:
        import openvino_genai as genai

        history = genai.ChatHistory()
        history.set_messages(list(messages))
        result = self._pipe.generate(history, self._generation, write)
        return Answer(result.texts[0], str(result.finish_reasons[0]), _figures(result))


def generation_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``generate`` for those of ``staticllm run``."""
    generation = {row.option: options[row.name] for row in SAMPLING if options[row.name] is not None}
    if generation.get("rng_seed") == 0:  # a seed like others, as over HTTP
        generation["rng_seed"] = ZERO_SEED
    if generation.get("temperature") == 0:  # greedy as everywhere else, also if the model's own config samples
        generation = {"do_sample": False}
    elif generation:
        generation["do_sample"] = True
    return {**generation, "max_new_tokens": options["max_new_tokens"], "apply_chat_template": not options["raw"]}


def _figures(result: GeneratedText | DecodedResults) -> dict[str, float]:
    metrics = result.perf_metrics
    return {
        "prompt_tokens": metrics.get_num_input_tokens(),
        "cached_tokens": metrics.get_num_cached_tokens(),
        "generated_tokens": metrics.get_num_generated_tokens(),
        "ttft_ms": round(metrics.get_ttft().mean, 3),
        "tpot_ms": round(metrics.get_tpot().mean, 3),
        "tokens_per_second": round(metrics.get_throughput().mean, 1),
        "load_ms": round(metrics.get_load_time(), 1),
    }


@dataclass
class _Received:
    """What a stream has brought so far."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    model: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    first: float | None = None

    def take(self, event: Mapping[str, Any]) -> str:
        """Take an event, and return the text that it brings."""
        self.model = event.get("model", self.model)
        self.usage = event.get("usage") or self.usage
        found = ""
        for choice in event.get("choices") or ():
            found += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if found:
            self.first = self.first or time.perf_counter()
            self.pieces.append(found)
        return found


class ServerBackend:
    """A model of a server; None for the server's first. ``options``: those of ``staticllm run``."""

    def __init__(self, client: ServerClient, model: str | None, options: Mapping[str, Any]) -> None:
        self._client = client
        self._is_raw = bool(options["raw"])
        given = {row.field: options[row.name] for row in SAMPLING if options[row.name] is not None}
        self._body = {
            **given,
            "max_tokens": options["max_new_tokens"],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if model is not None:
            self._body["model"] = model

    def check(self) -> None:
        """Check that the server is there and takes the key."""
        self._client.objects("/v1/models", "data")

    def answer(self, prompt: str, system: str, write: Write) -> Answer:
        if self._is_raw:
            return self._send("/v1/completions", {"prompt": prompt}, write)
        first = [{"role": "system", "content": system}] if system else []
        return self.chat([*first, {"role": "user", "content": prompt}], write)

    def chat(self, messages: Sequence[Message], write: Write) -> Answer:
        return self._send("/v1/chat/completions", {"messages": list(messages)}, write)

    def _send(self, path: str, asked: Mapping[str, Any], write: Write) -> Answer:
        received = _Received()
        begin = time.perf_counter()
        with self._client.stream(path, {**self._body, **asked}) as events:
            for event in events:
                piece = received.take(event)
                if piece and write(piece):
                    received.finish_reason = "cancelled"
                    break
        end = time.perf_counter()
        first = received.first
        usage = received.usage
        figures = {
            "model": received.model,
            "prompt_tokens": usage.get("prompt_tokens"),
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "generated_tokens": usage.get("completion_tokens"),
            "ttft_ms": None if first is None else round((first - begin) * 1e3, 3),
            "total_ms": round((end - begin) * 1e3, 3),
        }
        return Answer("".join(received.pieces), received.finish_reason, figures)
