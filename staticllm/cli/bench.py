"""``staticllm bench`` measures a model's speed on this machine, with the options of other runtimes' benchmarks."""

from __future__ import annotations

import csv
import io
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from staticllm.cli.grouped_command import GroupedCommand
from staticllm.cli.options import (
    PROGRAM_GROUP,
    TOKEN_IDS,
    check_lengths,
    check_output,
    flag,
    layout_options,
    model_argument,
    profiling,
    read_config,
    read_properties,
    refuse,
    value,
)
from staticllm.cli.progress import Progress, progress
from staticllm.config import StaticLLMConfig
from staticllm.system.files import read_regular
from staticllm.system.table import markdown

if TYPE_CHECKING:
    from staticllm.pipelines.diagnostics.reports import ChosenSettings, Divergence
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
    from staticllm.pipelines.programs.bind import BoundPrograms

SHORT_PROMPT = 16
"""Prompt tokens of a generation test at depth 0."""
CHART_WIDTH = 40
IDLE_SECONDS = 120.0
MOST_SHARED = 3
"""Programs at most where variants share them: one per phase, and one for single rows."""
MOST_TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class Test:
    """One test with ``clients`` concurrent requests, each with ``prompt`` prompt tokens and ``new`` generated tokens.

    ``pp512`` is a prompt of 512 tokens; ``tg128`` generates 128 tokens after a short prompt, ``tg128 @ d512`` after 512 tokens;
    ``c8`` runs eight requests with 64 prompt and 64 new tokens.
    """

    name: str
    flag: str
    """The command-line option of the test."""
    prompt: int
    new: int
    clients: int = 1


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    model: str
    device: str
    programs: str
    test: str
    tokens_per_second: float
    """The mean."""
    std: float
    """The standard deviation of tokens per second."""
    ms: float
    """The mean time to the first token for a prompt, else per token."""
    repetitions: int

    @property
    def kind(self) -> str:
        """The kind of test: "pp", "tg" or "c"; only tests of one kind can be compared."""
        return self.test.rstrip("0123456789 @d")


@dataclass(frozen=True)
class Measured:
    """The results of all tests, and the settings of the programs that ran them."""

    rows: list[Row]
    settings: list[ChosenSettings]


@dataclass(frozen=True)
class Report:
    """A report that is not about speeds: its JSON, and its lines of text."""

    values: object
    lines: Sequence[str]


class Counts(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has none
    """Whole numbers, separated by commas; 0 skips a test."""

    name = "N,N…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: must be whole numbers, separated by commas", param, ctx)
        if min(counts) < 0:
            self.fail(f"{value!r}: must not be negative", param, ctx)
        return counts


@contextmanager
def loaded(model: str, options: dict[str, Any], shown: Progress, **properties: Any) -> Iterator[StaticLLMPipeline]:
    """Load a pipeline with the properties of the options, and others that these win over; all of its programs are there."""
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

    given = {**properties, **read_properties(options)}
    with StaticLLMPipeline(Path(model), options["device"], config=given, on_progress=shown) as pipe:
        pipe.wait_until_complete()
        yield pipe


def report_costs(model: str, options: dict[str, Any]) -> Report:
    """Load a model, let its engine be idle until it has measured costs, and compare planned with timed costs."""
    with progress("loading") as shown, loaded(model, options, shown) as pipe:
        from staticllm.pipelines.diagnostics.costs import compare_costs, wait_for_costs

        num_kept = len(pipe.engine.runner.costs.adopted)
        is_complete = wait_for_costs(
            pipe.engine, IDLE_SECONDS, lambda *done: shown.show("measuring costs while idle", *done)
        )
        found = compare_costs(pipe.engine, lambda *done: shown.show("timing calls", *done))
    errors = sorted(abs(each.error) for each in found)
    rows = [
        [
            f"{each.variant}{' (estimate)' if each.is_estimate else ''}",
            f"{each.planned_ms:.1f}",
            f"{each.timed_ms:.1f}",
            f"{each.error:+.0%}",
        ]
        for each in found
    ]
    lines = [
        *markdown(["call", "planned, ms", "timed, ms", "error"], rows),
        "",
        f"errors of {len(found)} costs: median {statistics.median(errors):.1%}, 90 % below "
        f"{errors[int(0.9 * (len(errors) - 1))]:.1%}, largest {errors[-1]:.1%}",
    ]
    if num_kept:
        lines.append(f"{num_kept} costs were kept by an earlier start; some of them were measured again")
    if not is_complete:
        lines.append(f"some costs were not measured within {IDLE_SECONDS:g} s")
    return Report([{**asdict(each), "error": each.error} for each in found], lines)


def report_divergence(model: str, options: dict[str, Any]) -> Report:
    """Measure how far the model diverges from the original in f32 with each setting of this processor."""
    text = None if options["text"] is None else read_text(options["text"])
    with progress("writing texts with the original in f32" if text is None else "reading the model") as shown:
        from staticllm.pipelines.diagnostics.divergence import MOST_DIVERGENCE, measure_divergence

        config = read_config(options)
        found = list(
            measure_divergence(
                model,
                options["device"],
                config,
                lambda *done: shown.show("measuring the divergence of settings", *done),
                text,
            )
        )
    perplexity = f"the original's perplexity is {found[0].exact_perplexity:.2f}"
    end = f"over {found[0].tokens} tokens; limit {MOST_DIVERGENCE:.0e}; {perplexity}"
    head = ["settings", "chosen for", "mean KL", "99 %", "largest", "same top token", "perplexity", ""]
    lines = [
        *markdown(head, [divergence_row(each) for each in found]),
        "",
        f"divergence from the original in f32, nats per token, {end}",
    ]
    return Report([asdict(each) for each in found], lines)


def divergence_row(found: Divergence) -> list[str]:
    """Return the cells of a setting: what the calibration chose it for, divergences, agreement, perplexity and a remark."""
    return [
        found.settings,
        ", ".join(found.chosen_for),
        f"{found.mean:.1e} ± {found.error:.0e}",
        f"{found.percentile_99:.1e}",
        f"{found.largest:.1e}",
        f"{found.agreement:.1%}",
        f"{found.perplexity:.2f}",
        "" if found.is_within else "above the limit",
    ]


def read_text(path: str) -> str:
    """Return the text of a file, at most its first MiB.

    Raises:
        click.UsageError: it is no text in UTF-8.
    """
    try:
        return read_regular(Path(path), MOST_TEXT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise click.UsageError(
            f"--text {path}: give a text in UTF-8 of at most {MOST_TEXT_BYTES >> 20} MiB ({error})"
        ) from None


def report_calibration(model: str, options: dict[str, Any]) -> Report:
    """Load a model for the settings of its programs, and time the settings among which the calibration chooses."""
    with progress("loading") as shown:
        from staticllm.pipelines.diagnostics.settings import probe_times

        with loaded(model, options, shown) as pipe:
            chosen = _settings_of(pipe)
        shown.show("timing settings")
        times = list(probe_times(model, options["device"], read_config(options)))
    lines = [*_settings_lines(chosen), ""]
    if times:
        lines += markdown(
            ["rows", *times[0].ms], [[str(each.rows), *(f"{ms:.2f}" for ms in each.ms.values())] for each in times]
        )
        lines += ["", "ms of one product with each shape of matrix, weights not in a cache"]
    else:
        lines.append(
            "no settings to choose from: the device is not a CPU, or no shape of compressed matrices occurs twice"
        )
    return Report({"chosen": list(map(asdict, chosen)), "probe": list(map(asdict, times))}, lines)


def _settings_of(pipe: StaticLLMPipeline) -> list[ChosenSettings]:
    from staticllm.pipelines.diagnostics.settings import chosen_settings

    return chosen_settings(cast("BoundPrograms", pipe.engine.runner.programs))


def _settings_lines(chosen: Sequence[ChosenSettings]) -> list[str]:
    """Return a line for each program: its calls and its settings."""
    return [f"settings for {_calls(each)}: {each.settings}" for each in chosen]


def _calls(chosen: ChosenSettings) -> str:
    rows = f"{chosen.least_rows} to {chosen.most_rows} rows"
    rows = "1 row" if chosen.most_rows == 1 else rows
    names = {"generate": "decode steps", "prefill": "prompts"}
    return f"{' and '.join(names[phase] for phase in chosen.phases)} of {rows}"


REPORTS = {"costs": report_costs, "calibration": report_calibration, "divergence": report_divergence}
"""The options that print a report instead of speeds."""
OF_SPEEDS = ("n_prompt", "n_gen", "n_depth", "clients", "repetitions", "profile")
"""The options that say which speeds are measured."""
GROUPS = {"Reports instead of speeds": tuple(REPORTS), "Output": ("output", "as_json", "profile"), **PROGRAM_GROUP}


@click.command("bench", cls=GroupedCommand, groups=GROUPS)
@model_argument
@value("--n-prompt", Counts(), "Tokens per prompt; 0 skips this test.", "512")
@value("-n --n-gen", Counts(), "Tokens to generate; 0 skips this test.", "128")
@value("-d --n-depth", Counts(), "Tokens before the generated ones.", "0")
@value("-c --clients", Counts(), "Concurrent requests, 64 prompt and 64 new tokens each.", "0")
@value("-r --repetitions", click.IntRange(1), "Runs, after a warm-up.", 5)
@click.option("-o", "--output", type=click.Choice(["md", "json", "csv"]), default="md", show_default=True)
@flag("--json as_json", "Same as -o json.")
@value("--profile", click.Path(), "Write a Chrome trace (ui.perfetto.dev); print where a token's time goes.")
@flag("--costs", "Only compare the costs that calls are planned by with timed calls.")
@flag("--calibration", "Only print the programs' settings, and the times of all candidates.")
@flag("--divergence", "Only compare the settings of this CPU with the original in f32.")
@value("--text", click.Path(), "With --divergence: a text to measure with, in place of texts that the model writes.")
@layout_options
def command(model: str, **options: Any) -> None:
    """Measure MODEL, or the embedded demo model: prompts (pp), generation (tg), concurrent requests (c)."""
    asked = [name for name in REPORTS if options.pop(name)]
    if len(asked) > 1:
        raise click.UsageError(f"--{asked[0]} and --{asked[1]} print a report each: give one of them")
    if options["text"] is not None and asked != ["divergence"]:
        raise click.UsageError("--text is for --divergence: add it, or leave --text out")
    if asked and options["output"] == "csv":
        raise click.UsageError(f"--{asked[0]} prints a table or JSON: leave -o csv out")
    if asked:
        refuse(OF_SPEEDS, f"is for speeds, and --{asked[0]} prints a report instead")
        report = REPORTS[asked[0]](model, options)
        is_json = options["as_json"] or options["output"] == "json"
        click.echo(json.dumps(report.values, indent=2) if is_json else "\n".join(report.lines))
        return
    tests = _tests(options)
    if not tests:
        raise click.UsageError("nothing to measure: give --n-prompt, -n or -c a number above 0")
    properties = checked_properties(options, tests)
    if options["profile"] is not None:
        check_output(options["profile"])
    found = _run(Path(model), properties, tests, options)
    output = "json" if options["as_json"] else options["output"]
    if output == "json":
        click.echo(json.dumps([asdict(row) for row in found.rows], indent=2))
    elif output == "csv":
        click.echo(_csv(found.rows))
    else:
        click.echo("\n".join([_markdown(found.rows), "", *_settings_lines(found.settings)]))


def _run(path: Path, properties: dict[str, Any], tests: list[Test], options: dict[str, Any]) -> Measured:
    with progress("loading") as shown, loaded(str(path), options, shown, **properties) as pipe:
        with profiling(pipe, options["profile"]):
            found = [(test, list(_measure(pipe, test, options["repetitions"], shown))) for test in tests]
        programs = programs_of(cast("BoundPrograms", pipe.engine.runner.programs))
        settings = _settings_of(pipe)
    return Measured([_row(path, options["device"], programs, test, times) for test, times in found], settings)


def programs_of(programs: BoundPrograms) -> str:
    """Return the value of ``--programs`` that describes which variants of the compiled programs share one."""
    from staticllm.pipelines.programs.bind import PagedProgram

    owners = {variant: id(programs.compiled(variant)) for variant in programs}
    by_phase = {phase: {owner for v, owner in owners.items() if v.phase == phase} for phase in ("prefill", "generate")}
    num_programs = len(set(owners.values()))
    if any(isinstance(program, PagedProgram) for program in programs.bound):
        return "paged"
    if num_programs == 1:
        return "shared"
    if num_programs == len(owners) > MOST_SHARED:
        return "separate"
    return "few_rows" if by_phase["prefill"] & by_phase["generate"] else "phases"


def _tests(options: dict[str, Any]) -> list[Test]:
    tests = [Test(f"pp{count}", "--n-prompt", count, 1) for count in options["n_prompt"] if count]
    for depth, count in product(options["n_depth"], filter(None, options["n_gen"])):
        if depth:
            tests.append(Test(f"tg{count} @ d{depth}", "--n-depth", depth, count + 1))
        else:
            tests.append(Test(f"tg{count}", "--n-gen", SHORT_PROMPT, count + 1))
    return tests + [Test(f"c{count}", "--clients", 64, 64, count) for count in options["clients"] if count]


def checked_properties(options: dict[str, Any], tests: list[Test]) -> dict[str, Any]:
    """Return the user's properties, with lengths and a queue large enough for every test; nothing caches prefixes.

    Raises:
        UsageError: the user's lengths are too short for a test.
    """
    default = StaticLLMConfig()
    properties = {
        "MAX_PROMPT_LEN": max(default.max_prompt_len, *(test.prompt for test in tests)),
        "MIN_RESPONSE_LEN": max(default.min_response_len, *(test.new for test in tests)),
        "MAX_WAITING": max(default.max_waiting, *(test.clients for test in tests)),
        "PREFIX_CACHING": False,
        **read_properties(options),
    }
    for test in tests:
        check_lengths(test.flag, test.prompt, test.new, properties)
    return properties


def _measure(pipe: StaticLLMPipeline, test: Test, repetitions: int, shown: Progress) -> Iterator[tuple[float, float]]:
    """Yield for each repetition after the warm-up its seconds and the number of tokens that it processed in them."""
    import numpy as np

    for number in range(repetitions + 1):
        shown.show(f"measuring {test.name}", number, repetitions + 1)
        rng = np.random.default_rng([number, test.prompt, test.clients])
        prompts = [rng.integers(*TOKEN_IDS, test.prompt) for _ in range(test.clients)]
        first = time.perf_counter()
        handles = [pipe.submit(prompt, max_new_tokens=test.new, ignore_eos=True) for prompt in prompts]
        times = [handle.output().token_times for handle in handles]
        if not number:
            continue
        if test.clients > 1:
            yield max(found[-1] for found in times) - first, test.clients * test.new
        elif test.new == 1:
            yield times[0][0] - first, test.prompt
        else:
            yield times[0][-1] - times[0][0], test.new - 1


def _row(path: Path, device: str, programs: str, test: Test, times: list[tuple[float, float]]) -> Row:
    rates = [tokens / seconds for seconds, tokens in times]
    is_prompt = test.new == 1
    ms = [1e3 * seconds / (1 if is_prompt else tokens) for seconds, tokens in times]
    return Row(
        path.name, device, programs, test.name, statistics.fmean(rates), statistics.pstdev(rates), statistics.fmean(ms),
        len(times),
    )  # fmt: skip


def _markdown(rows: list[Row]) -> str:
    """Return a table, and a bar chart if there are several tests of one kind."""
    cells = [
        [row.model, row.device, row.programs, row.test, f"{row.tokens_per_second:.2f} ± {row.std:.2f}", f"{row.ms:.2f}"]
        for row in rows
    ]
    lines = markdown(["model", "device", "programs", "test", "t/s", "ms"], cells)
    width = max(len(row.test) for row in rows)
    rates: dict[str, list[float]] = {}
    for row in rows:
        rates.setdefault(row.kind, []).append(row.tokens_per_second)
    bars = [
        f"{row.test:<{width}}  {_bar(row.tokens_per_second / max(rates[row.kind]))} {row.tokens_per_second:.1f} t/s"
        for row in rows
        if len(rates[row.kind]) > 1
    ]
    return "\n".join([*lines, *(["", "share of the fastest test of its kind:", *bars] if bars else [])])


def _bar(share: float) -> str:
    eighths = max(1, round(share * CHART_WIDTH * 8))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _csv(rows: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue().rstrip()
