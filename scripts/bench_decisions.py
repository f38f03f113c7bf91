"""Decisions: how often answers are right and how sure they should be; and decisions per second beside GenAI.

python scripts/bench_decisions.py accuracy MODEL...     # 200 questions with known answers, each reading and number of orders
python scripts/bench_decisions.py speed                 # 20 questions about a state of 600 tokens, new and cached, in turns
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_bench_model import make

from staticllm import StaticLLMPipeline
from staticllm.pipelines.decisions.answers import Answer, ChoiceAnswer, PredicateAnswer, ScoreAnswer
from staticllm.pipelines.decisions.calibration import Example, Quality, kind_of, quality_of
from staticllm.pipelines.decisions.questions import Choice, Option, Predicate, Question, Score
from staticllm.system.table import markdown

STATES, PER_STATE = 40, 5
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("list, 1 order", {"reading": "list", "orders": 1}),
    ("list, 2 orders", {"reading": "list", "orders": 2}),
    ("list, 4 orders", {"reading": "list", "orders": 4}),
    ("branches", {"reading": "branches"}),
)
GOODS = ("lamp", "chair", "kettle", "bicycle", "printer", "carpet", "mirror", "guitar")
CITIES = ("Oslo", "Lisbon", "Vienna", "Dublin", "Prague", "Athens", "Zurich", "Warsaw")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
DESKS = {
    "returns": ("it arrived broken", "goods that are damaged or wrong"),
    "billing": ("I was charged twice for it", "payments, invoices and refunds"),
    "delivery": ("it has not arrived yet", "parcels that are late or lost"),
    "praise": ("it is lovely and works perfectly", "thanks and compliments"),
}
MOODS = (
    ("furious", ("This is outrageous, I am furious!", "I have never been so angry!")),
    ("calm", ("Please let me know.", "There is no hurry.")),
    ("delighted", ("I am so happy, thank you!", "You made my day!")),
)
PAID = ("card", "bank transfer", "cash")
STATE_LEN, QUESTION_LEN, NUM_QUESTIONS = 590, 15, 20
WORDS = [
    "the",
    "parcel",
    "arrived",
    "broken",
    "and",
    "late",
    "while",
    "weather",
    "turned",
    "cold",
    "over",
    "northern",
    "harbour",
    "where",
    "ships",
    "wait",
    "for",
    "new",
    "orders",
]


@dataclass(frozen=True)
class Known:
    """A question, and the number of the option that is right."""

    question: Question
    right: int


def cases(seed: int = 1) -> Iterator[tuple[str, list[Known]]]:
    """Yield states with questions whose answers follow from them."""
    rng = random.Random(seed)
    for _ in range(STATES):
        good, city, day, paid = rng.choice(GOODS), rng.choice(CITIES), rng.choice(DAYS), rng.choice(PAID)
        count = rng.choice((1, 3, 12))
        desk, (problem, _) = rng.choice(list(DESKS.items()))
        mood = rng.randrange(len(MOODS))
        goods = good if count == 1 else f"{good}s"
        state = (
            f"Message from a customer: On {day} I ordered {count} {goods} and paid by {paid}. It was to be sent to {city}, "
            f"and {problem}. {rng.choice(MOODS[mood][1])}"
        )
        yield state, _questions(rng, good, city, day, paid, count, desk, mood)


def _questions(
    rng: random.Random, good: str, city: str, day: str, paid: str, count: int, desk: str, mood: int
) -> list[Known]:
    claimed = paid if rng.random() < 0.5 else rng.choice([each for each in PAID if each != paid])
    cities = [*rng.sample([each for each in CITIES if each != city], 3), city]
    goods = [*rng.sample([each for each in GOODS if each != good], 3), good]
    desks = list(DESKS)
    for each in (cities, goods, desks):
        rng.shuffle(each)
    options = [Option(name, DESKS[name][1]) for name in desks]
    found = [
        Known(Predicate(f"The customer paid by {claimed}."), 0 if claimed == paid else 1),
        Known(Choice("Where was the order to be sent?", cities), cities.index(city)),
        Known(Choice("What was ordered?", goods), goods.index(good)),
        Known(Choice("Which desk should answer this message?", options), desks.index(desk)),
        Known(Score("How does the customer feel?", [name for name, _ in MOODS]), mood)
        if rng.random() < 0.5
        else Known(Score("How many pieces were ordered?", ["one", "a few", "a dozen"]), (1, 3, 12).index(count)),
    ]
    assert len(found) == PER_STATE
    return found


def probabilities_of(answer: Answer) -> list[float]:
    """Return the probability of each option, in the order of the question."""
    if isinstance(answer, PredicateAnswer):
        return [answer.probability, 1 - answer.probability]
    assert isinstance(answer, ChoiceAnswer | ScoreAnswer), "an answer that is not finite"
    return [each.probability for each in answer.probabilities]


def reversed_of(known: Known) -> Known:
    """Return a choice with its options reversed; other questions have one order."""
    question = known.question
    if not isinstance(question, Choice):
        return known
    return Known(Choice(question.instructions, list(question.options)[::-1]), len(question.options) - 1 - known.right)


def accuracy(models: Sequence[str]) -> None:
    """Print a table for each model."""
    for model in models:
        with StaticLLMPipeline(model, "CPU") as pipe:
            rows = [_row(pipe, name, options) for name, options in WAYS]
        print(f"\n{Path(model).name}\n")
        print(
            "\n".join(
                markdown(("reading", "predicate", "choice", "score", "all", "log-loss", "Brier", "ECE", "flips"), rows)
            )
        )


def _row(pipe: StaticLLMPipeline, name: str, options: dict[str, Any]) -> tuple[str, ...]:
    examples: list[Example] = []
    flips = 0
    num_choices = 0
    for state, asked in cases():
        turned = [reversed_of(known) for known in asked]
        found = [pipe.decide(state, [each.question for each in known], **options).answers for known in (asked, turned)]
        for known, answer, other in zip(asked, *found, strict=True):
            p = probabilities_of(answer)
            examples.append(Example(kind_of(known.question), tuple(math.log(max(x, 1e-300)) for x in p), known.right))
            if isinstance(known.question, Choice):
                num_choices += 1
                q = probabilities_of(other)[::-1]
                flips += p.index(max(p)) != q.index(max(q))
    kinds = {
        kind: quality_of([each for each in examples if each.kind == kind]) for kind in ("predicate", "choice", "score")
    }
    total: Quality = quality_of(examples)
    shares = (f"{kinds[kind].accuracy:.2f}" for kind in kinds)
    numbers = (total.accuracy, total.log_loss, total.brier, total.calibration_error, flips / num_choices)
    return (name, *shares, *(f"{each:.3f}" for each in numbers))


def text_of(tokenizer: Any, rng: random.Random, length: int) -> str:
    """Return words that are at least ``length`` tokens together."""
    text = rng.choice(WORDS)
    while tokenizer.encode(text, add_special_tokens=False).input_ids.shape[1] < length:
        text += " " + rng.choice(WORDS)
    return text


def speed(rounds: int) -> None:
    """Print decisions per second of both sides, in turns."""
    import openvino_genai as genai

    model = str(make("qwen2-0.5b"))
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 2
    peer = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})
    config = genai.GenerationConfig()
    config.max_new_tokens = 1
    config.logprobs = 4
    config.ignore_eos = True
    times: dict[str, list[float]] = {}
    with StaticLLMPipeline(model, "CPU") as pipe:
        time.sleep(20)  # ours measures its costs while it rests
        for seed in range(rounds + 1):
            for cached in (False, True):
                state, questions = _speed_case(peer.get_tokenizer(), seed, cached)
                prompts = [_prompt_of(state, question) for question in questions]
                turns: tuple[tuple[str, Callable[[], object]], ...] = (
                    ("ours", lambda state=state, asked=questions: pipe.decide(state, asked, orders=1)),  # type: ignore[misc]
                    ("genai", lambda prompts=prompts: peer.generate(prompts, [config] * len(prompts))),  # type: ignore[misc]
                )
                for name, run in turns:
                    begin = time.perf_counter()
                    run()
                    if seed:
                        key = f"{name} {'cached' if cached else 'new'}"
                        times.setdefault(key, []).append(time.perf_counter() - begin)
    for kind in ("new", "cached"):
        ours, other = (statistics.median(times[f"{name} {kind}"]) for name in ("ours", "genai"))
        ratio = statistics.median(b / a for a, b in zip(times[f"ours {kind}"], times[f"genai {kind}"], strict=True))
        rates = f"{NUM_QUESTIONS / ours:.2f} and {NUM_QUESTIONS / other:.2f} decisions/s"
        print(f"{kind} state: ours {ours:.2f} s, GenAI {other:.2f} s, {rates}, {ratio:.2f} times as many")


def _speed_case(tokenizer: Any, seed: int, cached: bool) -> tuple[str, list[Choice]]:
    rng = random.Random(seed)
    state = text_of(tokenizer, rng, STATE_LEN)
    rng = random.Random(1000 * seed + cached)
    return state, [
        Choice(text_of(tokenizer, rng, QUESTION_LEN), rng.sample(WORDS[:16], 4)) for _ in range(NUM_QUESTIONS)
    ]


def _prompt_of(state: str, question: Choice) -> str:
    """Return what a user of GenAI would send: the same texts in one message."""
    items = "\n".join(f"- {option}" for option in question.options)
    task = "Read the text and choose the option that is right. Answer with that option only."
    return f"{task}\n\nText: {state}\n\nQuestion: {question.instructions}\n{items}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("accuracy", "speed"))
    parser.add_argument("models", nargs="*", help="directories or GGUF files, for accuracy")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    options = parser.parse_args()
    if options.what == "accuracy":
        if not options.models:
            sys.exit("accuracy needs a model: give directories or GGUF files")
        accuracy(options.models)
    else:
        speed(options.rounds)


if __name__ == "__main__":
    main()
