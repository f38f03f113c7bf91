"""``staticllm decide`` answers typed questions about a state, and ``staticllm calibrate`` fits temperatures to known answers."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.grouped_command import GroupedCommand
from staticllm.cli.model_arguments import model_and_prompt, model_directory
from staticllm.cli.options import check_output, flag, layout_options, model_argument, read_properties, value
from staticllm.cli.progress import progress
from staticllm.errors import ConfigError, StaticLLMError, quoted
from staticllm.system.table import markdown

if TYPE_CHECKING:
    from staticllm.pipelines.decisions.answers import Answer, Decision
    from staticllm.pipelines.decisions.calibration import Example
    from staticllm.pipelines.decisions.questions import Question
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

GROUPS = {
    "Questions": ("predicate", "choice", "score", "questions"),
    "Answers": ("reading", "orders", "calibration", "as_json"),
}
BAR = 20
MAX_LINE = 1 << 24
"""The most characters of a line of examples."""


@click.command("decide", cls=GroupedCommand, groups=GROUPS)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [STATE]")
@value("-m --model", click.Path(), "Model directory; then the argument is the state.")
@value("-f --file", click.Path(), "Read the state from a file; - for stdin.")
@click.option("--predicate", multiple=True, metavar="TEXT", help="Ask whether TEXT holds. May be repeated.")
@click.option(
    "--choice", multiple=True, nargs=2, metavar="TEXT OPTIONS",
    help="Ask which of several OPTIONS, divided by commas; an option may be name=description. May be repeated.",
)  # fmt: skip
@click.option(
    "--score", multiple=True, nargs=2, metavar="TEXT LEVELS",
    help="Ask how much, on LEVELS divided by commas, the lowest first. May be repeated.",
)  # fmt: skip
@value("--questions", click.Path(), "A JSON file with a list of questions, as in /v1/decisions.")
@value("--reading", click.Choice(["list", "branches"]), "Show options in a list, or each on its own.  [list]")
@value("--orders", click.IntRange(1, 4), "Orders of a list whose answers are averaged.  [2]")
@value("--calibration", click.Path(), "A file of `staticllm calibrate`, or its folder.  [none]")
@flag("--json as_json", "Print JSON.")
@layout_options
def decide(arguments: tuple[str, ...], model: str | None, **options: Any) -> None:
    """Answer questions about STATE, a text, with probabilities; no text is generated.

    A single argument is the model if it is a path, or looks like one, and else the state for the embedded demo model. The state
    is an argument, a file (-f), or comes from stdin.
    """
    from staticllm.pipelines.decisions.calibration import Calibration

    given = model_and_prompt(arguments, model, "embedded demo model")
    directory = model_directory(given.model, given.hint)
    questions = _questions(options)
    calibration = None if options["calibration"] is None else Calibration.read(Path(options["calibration"]))
    text = _state(given.prompt, options["file"])
    with progress("loading") as shown, _load(directory, options, shown) as pipe:
        shown.show("deciding")
        found = pipe.decide(
            text, questions, reading=options["reading"], orders=options["orders"], calibration=calibration
        )
    if options["as_json"]:
        click.echo(json.dumps(_as_json(found), ensure_ascii=False, indent=1))
    else:
        click.echo("\n".join(_as_text(questions, found)))


@click.command("calibrate", cls=GroupedCommand, groups={})
@click.argument("examples", type=click.Path())
@model_argument
@value("-o --output", click.Path(), "Where the temperatures go.  [staticllm_calibration.json beside the model]")
@value("--reading", click.Choice(["list", "branches"]), "As for `staticllm decide`.  [list]")
@value("--orders", click.IntRange(1, 4), "As for `staticllm decide`.  [2]")
@layout_options
def calibrate(model: str, examples: str, **options: Any) -> None:
    """Fit a temperature per type of question to EXAMPLES, and say how good probabilities are with and without it.

    MODEL is the first argument, unless -m names it. Each line of EXAMPLES is a JSON object with "state", a "question" as in
    /v1/decisions, and its "answer": true or false, the value of a choice, or the label of a level. Every second state is
    left out of the fit, and the figures are those of these. `staticllm decide --calibration` uses what was fitted.
    """
    from staticllm.pipelines.decisions.calibration import (
        FILE_NAME,
        KINDS,
        MIN_EXAMPLES,
        Calibration,
        fitted,
        quality_of,
    )

    output = Path(options["output"]) if options["output"] else _beside(model) / FILE_NAME
    check_output(str(output))
    asked = list(_examples(Path(examples)))
    with progress("loading") as shown, _load(model, options, shown) as pipe:
        found = _scored(pipe, asked, options, shown)
    rows: list[tuple[str, ...]] = []
    temperatures: dict[str, float] = {}
    for kind in KINDS:
        fit = [example for place, example in found if example.kind == kind and not place % 2]
        held = [example for place, example in found if example.kind == kind and place % 2]
        if len(fit) < MIN_EXAMPLES or not held:
            continue
        temperatures[kind] = fitted(fit)
        for name, heat in (("before", 1.0), ("after", temperatures[kind])):
            good = quality_of(held, heat)
            numbers = (good.accuracy, good.log_loss, good.brier, good.calibration_error)
            rows.append((kind, name, f"{heat:.3f}", str(good.num), *(f"{each:.3f}" for each in numbers)))
    if not temperatures:
        raise ConfigError(
            f"{quoted(examples)} has too few examples: at least {2 * MIN_EXAMPLES} of a type, of several states"
        )
    Calibration(temperatures).write(output)
    head = ("type", "", "temperature", "examples", "accuracy", "log-loss", "Brier (0 to 2)", "ECE")
    click.echo("\n".join(markdown(head, rows)))
    click.echo(f"wrote {output}; use it with --calibration {output}")


def _load(model: str, options: dict[str, Any], shown: Any) -> StaticLLMPipeline:
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

    return StaticLLMPipeline(model, options["device"], config=read_properties(options), on_progress=shown)


def _beside(model: str) -> Path:
    path = Path(model)
    return path if path.is_dir() else path.parent


def _state(given: str | None, file: str | None) -> str:
    if given is not None and file is not None:
        raise click.UsageError("the state and --file both say what the questions are about: leave one out")
    if given is not None:
        return given
    try:
        return sys.stdin.read() if file in (None, "-") else Path(str(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{quoted(file or 'stdin')} cannot be read: {error}") from error


def _questions(options: dict[str, Any]) -> list[Question]:
    from staticllm.pipelines.decisions.questions import Choice, Level, Option, Predicate, Score
    from staticllm.pipelines.decisions.written import questions_of

    found: list[Question] = []
    if options["questions"] is not None:
        items = _json_of(Path(options["questions"]))
        if not isinstance(items, list):
            raise ConfigError(f"{quoted(options['questions'])} holds no list of questions")
        found += questions_of(items)
    found += [Predicate(text) for text in options["predicate"]]
    found += [Choice(text, [Option(*_named(each)) for each in _split(items)]) for text, items in options["choice"]]
    found += [Score(text, [Level(*_named(each)) for each in _split(items)]) for text, items in options["score"]]
    if not found:
        raise click.UsageError("no question: give --predicate, --choice, --score or --questions")
    return found


def _split(items: str) -> list[str]:
    return [part.strip() for part in items.split(",")]


def _named(item: str) -> tuple[str, str | None]:
    name, equals, description = item.partition("=")
    return name.strip(), description.strip() if equals else None


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{quoted(path)} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{quoted(path)} is no JSON: {error}") from error


def _as_json(found: Decision) -> dict[str, Any]:
    from staticllm.pipelines.decisions.written import written

    usage = found.usage
    tokens = {"input": usage.input_tokens, "cached": usage.cached_tokens, "device": usage.device_tokens}
    return {"answers": [written(answer) for answer in found.answers], "tokens": tokens}


def _as_text(questions: Iterable[Question], found: Decision) -> Iterator[str]:
    for question, answer in zip(questions, found.answers, strict=True):
        yield question.instructions
        yield from (f"  {name:<24.24} {_bar(p)} {100 * p:5.1f} %" for name, p in _shares(answer))
    usage = found.usage
    yield f"({usage.input_tokens} tokens, {usage.cached_tokens} of them cached)"


def _bar(probability: float) -> str:
    filled = round(BAR * probability)
    return "█" * filled + "·" * (BAR - filled)


def _shares(answer: Answer) -> list[tuple[str, float]]:
    from staticllm.pipelines.decisions.answers import ChoiceAnswer, PredicateAnswer, ScoreAnswer

    if isinstance(answer, PredicateAnswer):
        return [("yes", answer.probability), ("no", 1 - answer.probability)]
    if isinstance(answer, ChoiceAnswer):
        return [(str(each.value), each.probability) for each in answer.probabilities]
    if isinstance(answer, ScoreAnswer):
        return [(each.label, each.probability) for each in answer.probabilities]
    return []


def _examples(path: Path) -> Iterator[tuple[str, Question, int]]:
    """Yield the state, the question and the number of the right option of each line.

    Raises:
        ConfigError: a line is no example; the message says which.
    """
    from staticllm.pipelines.decisions.prompts import state_text
    from staticllm.pipelines.decisions.written import question_of, right_option

    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    values = json.loads(line[:MAX_LINE])
                    question = question_of(values["question"])
                    yield state_text(values["state"]), question, right_option(question, values["answer"])
                except (ValueError, KeyError, TypeError, RecursionError, StaticLLMError) as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{quoted(path)} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{quoted(path)} is not UTF-8: {error}") from error


def _scored(
    pipe: StaticLLMPipeline, asked: list[tuple[str, Question, int]], options: dict[str, Any], shown: Any
) -> list[tuple[int, Example]]:
    """Return the examples with the probabilities of the model, and the number of the state of each."""
    from staticllm.pipelines.decisions.calibration import Example, kind_of
    from staticllm.pipelines.decisions.questions import MAX_QUESTIONS
    from staticllm.pipelines.decisions.written import log_probabilities

    found: list[tuple[int, Example]] = []
    groups: dict[str, list[tuple[Question, int]]] = defaultdict(list)
    for state, group in groupby(asked, key=lambda each: each[0]):
        groups[state] += [(question, right) for _, question, right in group]
    for place, (state, known) in enumerate(groups.items()):
        shown.show("deciding", place, len(groups))
        questions = [question for question, _ in known]
        answers = [
            answer
            for start in range(0, len(questions), MAX_QUESTIONS)
            for answer in pipe.decide(
                state,
                questions[start : start + MAX_QUESTIONS],
                reading=options["reading"],
                orders=options["orders"],
            ).answers
        ]
        for (question, right), answer in zip(known, answers, strict=True):
            if (scores := log_probabilities(answer)) is not None:
                found.append((place, Example(kind_of(question), scores, right)))
    return found
