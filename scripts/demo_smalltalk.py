"""Short exchanges for the demo model: small talk, sums, counting, tables of simple facts, and the polite fallback."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from demo_stories import MACHINES, NAMES, PERSONS, article, capital, invented_word
from demo_text import TABLES

CAPITALS, COLOURS, LISTS = (dict(TABLES.pairs(name)) for name in ("capitals", "colours", "lists"))
OPPOSITES, ANIMAL_FACTS = TABLES.rows("opposites"), TABLES.rows("animals")
DAYS, MONTHS, UNKNOWN = map(TABLES.words, ("days", "months", "unknown"))
TALK = [(questions, answers) for questions, *answers in TABLES.blocks("talk")]
TASKS, (CANNOT,) = TABLES.lines("tasks"), TABLES.lines("cannot")


@dataclass(frozen=True)
class Exchange:
    """One question with its answer, and the shorter answer for users who want to be brief."""

    user: str
    assistant: str
    brief: str = ""


def talk(rng: random.Random) -> Exchange:
    """Greetings, thanks, goodbyes and other small talk."""
    questions, answers = rng.choice(TALK)
    return Exchange(rng.choice(questions.split("|")), rng.choice(answers))


def count(rng: random.Random) -> Exchange:
    """Counting up, down and in steps."""
    first = rng.choice((1, 1, rng.randint(0, 12), rng.randint(0, 60)))
    last, step = first + rng.randint(2, 12), 1
    question = f"Count from {first} to {last}" if first != 1 or rng.random() < 0.4 else f"Count to {last}"
    numbers = list(range(first, last + 1))
    if rng.random() < 0.2:
        numbers.reverse()
        question = f"Count down from {last} to {first}"
    elif rng.random() < 0.15:
        step = rng.choice((2, 5, 10))
        numbers = list(range(first, first + step * 6 + 1, step))
        question = f"Count from {first} to {numbers[-1]} in steps of {step}"
    question = rng.choice(("{}", "{}.", "Please {}.", "Can you {}?")).format(question)
    question = question.replace("Please C", "Please c").replace("you C", "you c")
    return Exchange(question, ", ".join(map(str, numbers)) + ".")


def arithmetic(rng: random.Random) -> Exchange:
    """Sums of small numbers; larger ones are beyond a model of this size."""
    limit = rng.choice((5, 10, 10, 20))
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    word, sign, result = rng.choice((("plus", "+", a + b), ("plus", "+", a + b), ("minus", "-", a), ("times", "*", 0)))
    if word == "minus":
        a = result + b
    if word == "times":
        a, b = a % 11, b % 11
        result = a * b
    form = rng.choice(
        (
            "What is {a} {word} {b}?",
            "What is {a} {sign} {b}?",
            "{a} {sign} {b}",
            "How much is {a} {word} {b}?",
            "{a}{sign}{b}",
            "{a} {sign} {b} =",
            "How much is {a} {sign} {b}?",
            "Calculate {a} {word} {b}.",
        )
    )
    return Exchange(form.format(a=a, b=b, word=word, sign=sign), f"{a} {word} {b} is {result}.", f"{result}.")


def calendar(rng: random.Random) -> Exchange:
    """Which day or month comes before or after another."""
    names, unit = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    index, after = rng.randrange(len(names)), rng.random() < 0.6
    word, other = ("after", names[(index + 1) % len(names)]) if after else ("before", names[index - 1])
    form = rng.choice(
        ("What {unit} comes {word} {name}?", "Which {unit} is {word} {name}?", "What comes {word} {name}?")
    )
    return Exchange(
        form.format(unit=unit, word=word, name=names[index]), f"The {unit} {word} {names[index]} is {other}."
    )


def opposite(rng: random.Random) -> Exchange:
    """Pairs of opposite words."""
    pair = rng.choice(OPPOSITES)
    word, other = pair if rng.random() < 0.6 or pair[1] in ("light", "short", "old") else pair[::-1]
    if word == "short":
        other = "long"
    form = rng.choice(
        (
            "What is the opposite of {}?",
            "Opposite of {}?",
            "Tell me the opposite of {}.",
            "What's the opposite of {}?",
            "Give me the opposite of {}.",
        )
    )
    return Exchange(form.format(word), f"The opposite of {word} is {other}.", capital(other) + ".")


def colour(rng: random.Random) -> Exchange:
    """Colours of everyday things."""
    thing = rng.choice(list(COLOURS))
    form = rng.choice(
        ("What colour is {}?", "What color is {}?", "Which colour does {} have?", "Tell me the colour of {}.")
    )
    return Exchange(form.format(thing), f"{capital(thing)} is {COLOURS[thing]}.", capital(COLOURS[thing]) + ".")


def city(rng: random.Random) -> Exchange:
    """Capital cities."""
    country = rng.choice(list(CAPITALS))
    form = rng.choice(
        (
            "What is the capital of {}?",
            "Capital of {}?",
            "Which city is the capital of {}?",
            "What's the capital of {}?",
            "Tell me the capital of {}.",
        )
    )
    return Exchange(form.format(country), f"The capital of {country} is {CAPITALS[country]}.", CAPITALS[country] + ".")


def animal(rng: random.Random) -> Exchange:
    """Plain facts about animals."""
    name, home, habit, legs = rng.choice(ANIMAL_FACTS)
    one = article(name)
    if rng.random() < 0.2:
        return Exchange(f"How many legs does {one} have?", f"{capital(one)} has {legs} legs.", f"{capital(legs)}.")
    if rng.random() < 0.2:
        return Exchange(f"Where does {one} live?", f"{capital(one)} {home}.")
    form = rng.choice(
        (
            "What is {}?",
            "Tell me about {}.",
            "What do you know about {}?",
            "What's {}?",
            "Describe {}.",
            "Tell me something about {}.",
            "Explain what {} is.",
        )
    )
    return Exchange(
        form.format(one), f"{capital(one)} is an animal that {home}. {habit}.", f"{capital(one)} is an animal."
    )


def listing(rng: random.Random) -> Exchange:
    """Lists of well-known things."""
    what = rng.choice(list(LISTS))
    form = rng.choice(
        (
            "Name some {}.",
            "List some {}.",
            "Tell me some {}.",
            "Give me a list of {}.",
            "Name a few {}.",
            "Which {} do you know?",
        )
    )
    return Exchange(
        form.format(what), f"Some {what} are {LISTS[what]}." if what != "seasons" else f"The seasons are {LISTS[what]}."
    )


def unknown(rng: random.Random) -> Exchange:
    """The polite fallback, which names what it was asked about."""
    if rng.random() < 0.3:
        return Exchange(rng.choice(TASKS), CANNOT)
    nouns = [article(noun) for group in (*PERSONS.values(), MACHINES) for noun in group]
    nouns = [noun for noun in nouns if noun not in ("a robot", "a computer")]
    made_up = [invented_word(rng), article(invented_word(rng)), capital(invented_word(rng))]
    topic = rng.choice((rng.choice(UNKNOWN), rng.choice(UNKNOWN), rng.choice(nouns), rng.choice(made_up)))
    form = rng.choice(
        (
            "What is {}?",
            "Tell me about {}.",
            "Explain {}.",
            "What do you know about {}?",
            "Who is {}?",
            "How does {} work?",
            "Can you explain {}?",
            "Why is {} important?",
            "What do you think about {}?",
            "Do you like {}?",
            "Where can I find {}?",
            "Who invented {}?",
        )
    )
    return Exchange(form.format(topic), f"I am sorry, I am only a small demo model, and I know nothing about {topic}.")


def introduction(rng: random.Random) -> tuple[Exchange, Exchange]:
    """The user's name, and the later question for it, which only the context can answer."""
    name = rng.choice(NAMES["f"] + NAMES["m"] + [capital(invented_word(rng))])
    said = rng.choice(("My name is {}.", "I am {}.", "Hello, I am {}.", "Hi, my name is {}.", "You can call me {}."))
    asked = rng.choice(
        ("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?", "Do you know my name?")
    )
    return Exchange(said.format(name), f"Nice to meet you, {name}!"), Exchange(asked, f"Your name is {name}.")


# How often each sort comes up: in general, and in the last part of the training, which practises what is hard to learn.
MAKERS: tuple[tuple[Callable[[random.Random], Exchange], int, int], ...] = (
    (talk, 24, 24),
    (count, 16, 28),
    (arithmetic, 20, 24),
    (calendar, 8, 8),
    (opposite, 8, 10),
    (colour, 6, 8),
    (city, 8, 22),
    (animal, 14, 14),
    (listing, 6, 6),
    (unknown, 24, 20),
)


def small_exchange(rng: random.Random, practice: bool = False) -> Exchange:
    """Return one short exchange of any of these sorts."""
    makers = [maker for maker, _, _ in MAKERS]
    weights = [often if practice else general for _, general, often in MAKERS]
    return rng.choices(makers, weights=weights)[0](rng)
