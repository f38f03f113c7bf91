"""``staticllm run``: text from a prompt, from stdin, or a chat."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.options import check_output, layout_options, profiling, read_properties
from staticllm.errors import PromptTooLongError
from staticllm.model_dir import demo_model_path

if TYPE_CHECKING:
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
    from staticllm.results import GeneratedText


@click.command("run")
@click.argument("prompt", required=False)
@click.option("-m", "--model", type=click.Path(), help="Model directory.  [the embedded demo model]")
@click.option("-n", "--max-new-tokens", type=int, default=256, show_default=True, help="Longest answer, in tokens.")
@click.option("--system", default="", help="System message.")
@click.option("--temperature", type=float, help="Sample at this temperature; greedy without it.")
@click.option("--top-p", type=float, help="Sample from the smallest set with this probability.")
@click.option("--top-k", type=int, help="Sample from this many tokens.")
@click.option("--seed", type=int, help="Seed for sampling.")
@click.option("--raw", is_flag=True, help="Do not apply the chat template.")
@click.option("--stats", is_flag=True, help="Print timings to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a stream.")
@click.option(
    "--profile", type=click.Path(), help="Write a Chrome trace (ui.perfetto.dev); print where a token's time goes."
)
@layout_options
def command(prompt: str | None, model: str | None, **options: Any) -> None:
    """Generate text: for PROMPT, for stdin if it is piped, else in a chat.

    In a chat, Ctrl-C stops the answer, twice leaves.
    """
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

    if prompt is None and (sys.stdin is None or not sys.stdin.isatty()):
        prompt = sys.stdin.read().strip("\r\n") if sys.stdin else ""
    if options["raw"] and (prompt is None or options["system"]):
        raise click.UsageError("--raw goes with a prompt and without --system: a chat needs the template")
    if options["profile"] is not None:
        check_output(options["profile"])
    pipe = StaticLLMPipeline(model or demo_model_path(), options["device"], config=read_properties(options))
    generation = _generation(options)
    with profiling(pipe, options["profile"]):
        if prompt is None:
            Chat(pipe, generation, options["stats"]).run(options["system"])
        else:
            _answer(pipe, prompt, generation, options)


def _generation(options: dict[str, Any]) -> dict[str, Any]:
    chosen = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "rng_seed"}
    generation = {name: options[key] for key, name in chosen.items() if options[key] is not None}
    if generation.get("temperature") == 0:  # as everywhere else: greedy
        generation = {}
    if generation:
        generation["do_sample"] = True
    return {**generation, "max_new_tokens": options["max_new_tokens"], "apply_chat_template": not options["raw"]}


def _answer(pipe: StaticLLMPipeline, prompt: str, generation: dict[str, Any], options: dict[str, Any]) -> None:
    if options["system"]:
        pipe.start_chat(options["system"])
    result = pipe.generate(prompt, generation, None if options["as_json"] else _show)
    if options["as_json"]:
        click.echo(json.dumps({"text": str(result), "finish_reason": str(result.finish_reasons[0]), **_stats(result)}))
        return
    click.echo()
    if options["stats"]:
        _print_stats(result)


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _stats(result: GeneratedText) -> dict[str, float]:
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


def _print_stats(result: GeneratedText) -> None:
    s = _stats(result)
    tpot = f"TPOT {s['tpot_ms']:.2f} ms ({s['tokens_per_second']:.0f} tokens/s)" if s["tpot_ms"] >= 0 else "TPOT -"
    click.echo(
        f"{s['prompt_tokens']} prompt tokens ({s['cached_tokens']} cached), {s['generated_tokens']} generated "
        f"({result.finish_reasons[0]}) | TTFT {s['ttft_ms']:.1f} ms | {tpot} | load {s['load_ms'] / 1e3:.2f} s",
        err=True,
    )


class Chat:
    """An interactive chat. One Ctrl-C stops the answer, or asks at the prompt; the next one leaves."""

    def __init__(self, pipe: StaticLLMPipeline, generation: dict[str, Any], with_stats: bool) -> None:
        self._pipe = pipe
        self._generation = generation
        self._with_stats = with_stats
        self._interrupts = 0
        self._is_answering = False
        self._system_message = ""

    def run(self, system_message: str) -> None:
        """Until Ctrl-D, or Ctrl-C twice."""
        click.echo("Ctrl-C stops an answer, twice leaves; so does Ctrl-D.", err=True)
        self._system_message = system_message
        self._pipe.start_chat(system_message)
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            while (text := self._ask()) is not None:
                if text.strip():
                    self._turn(text)
        except KeyboardInterrupt:
            click.echo()
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_interrupt(self, signum: int, frame: object) -> None:
        """The first Ctrl-C of an answer is only noted: the streamer stops it. At the prompt, and the second, it raises."""
        self._interrupts += 1
        if self._interrupts > 1 or not self._is_answering:
            raise KeyboardInterrupt

    def _ask(self) -> str | None:
        while True:
            try:
                text = input("> ")
            except EOFError:
                click.echo()
                return None
            except KeyboardInterrupt:
                if self._interrupts > 1:
                    raise
                click.echo("\n(Ctrl-C again to leave)", err=True)
                continue
            self._interrupts = 0
            return text

    def _turn(self, text: str) -> None:
        self._is_answering = True
        try:
            result = self._pipe.generate(text, self._generation, self._stream)
        except PromptTooLongError as error:
            click.echo(
                f"The conversation is full ({error.num_tokens} tokens, {error.limit} fit): a new one begins.", err=True
            )
            self._pipe.start_chat(self._system_message)
            return
        finally:
            self._is_answering = False
        click.echo()
        if self._with_stats:
            _print_stats(result)

    def _stream(self, piece: str) -> bool:
        _show(piece)
        return self._interrupts > 0
