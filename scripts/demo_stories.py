"""Grammar of short stories for the demo model's training text.

Every story is built from a plot (a list of steps, each step a list of alternative sentences) and a cast.
About half of the choices depend on the subject alone instead of on chance: under greedy decoding the model
then tells different stories about different subjects, instead of the one most frequent story.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from demo_text import HABITATS, PLOTS, WORDS, Plot, plots, words_under

ANIMALS, PERSONS, NAMES = map(words_under, ("animals", "persons", "names"))
INTROS, TRAIT_LINES, ENDINGS = map(PLOTS.lines, ("intros", "traits", "endings"))
SOLO_PLOTS, DUO_PLOTS = plots("solo"), plots("duo")
THING_PLOTS = {kind: plots(kind) for kind in ("object", "landmark")}
MACHINES, MAGIC, OBJECTS, LANDMARKS = map(WORDS.words, ("machines", "magic", "objects", "landmarks"))
ADJECTIVES, TRAITS, WEATHERS, TREASURES = map(WORDS.words, ("adjectives", "traits", "weathers", "treasures"))
SKILLS, FEARS, SETTINGS, SYLLABLES = map(WORDS.words, ("skills", "fears", "settings", "syllables"))
T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """Somebody or something that a story can be about."""

    noun: str
    kind: str  # "animal", "person", "machine" or "thing"
    habitat: str
    gender: str = ""


@dataclass(frozen=True)
class StoryRequest:
    """What the user asked for: the phrase used in the prompt, and the story itself."""

    phrase: str
    text: str


def article(noun_phrase: str) -> str:
    """Return the noun phrase with its indefinite article."""
    return f"{'an' if noun_phrase[0].lower() in 'aeio' or noun_phrase.startswith('umb') else 'a'} {noun_phrase}"


def capital(text: str) -> str:
    """Upper-case the first letter and leave the rest as it is."""
    return text[:1].upper() + text[1:]


def invented_word(rng: random.Random) -> str:
    """Make up a word: it is in no list, so the model can only learn to copy it from the prompt."""
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3)))


def _all_subjects() -> tuple[list[Subject], list[Subject]]:
    """Return the subjects that can act, and the things that cannot."""
    actors = [Subject(noun, "animal", place) for place, nouns in ANIMALS.items() for noun in nouns]
    actors += [Subject(noun, "person", "town", sex) for sex, nouns in PERSONS.items() for noun in nouns]
    actors += [Subject(noun, "machine", "workshop") for noun in MACHINES]
    actors += [Subject(noun, "animal", "magic") for noun in MAGIC]
    things = [Subject(noun, "thing", "object") for noun in OBJECTS]
    things += [Subject(noun, "thing", "landmark") for noun in LANDMARKS]
    return actors, things


ACTORS, THINGS = _all_subjects()
FREQUENT = ("fox", "robot", "dragon", "cat", "dog", "bear", "girl", "boy", "lighthouse", "rabbit", "princess", "mouse")


class Teller:
    """Makes the choices of one story: some by chance, some fixed by the subject (see the module text)."""

    def __init__(self, rng: random.Random, key: str, fixed_share: float = 0.6) -> None:
        self.rng, self.key, self.fixed_share, self.count = rng, key, fixed_share, 0

    def pick(self, options: Sequence[T]) -> T:
        """Choose one option, by the subject's name and the number of the choice, or by chance."""
        self.count += 1
        if self.rng.random() < self.fixed_share:
            return options[zlib.crc32(f"{self.key}/{self.count}".encode()) % len(options)]
        return self.rng.choice(options)


def pronouns(prefix: str, gender: str) -> dict[str, str]:
    """Return the pronoun slots of one character, as {he}, {He}, {him}, {his}, {himself}."""
    words = {"f": ("she", "her", "her", "herself"), "m": ("he", "him", "his", "himself")}
    he, him, his, himself = words.get(gender, ("it", "it", "its", "itself"))
    slots = {"he": he, "He": he.capitalize(), "him": him, "his": his, "His": his.capitalize(), "himself": himself}
    return {prefix + name: value for name, value in slots.items()}


def _cast(teller: Teller, subject: Subject, adjective: str, name: str) -> tuple[str, dict[str, str]]:
    """Return how the story introduces its hero, and the hero's slots."""
    gender = subject.gender
    if not gender and (subject.kind == "person" or name):
        gender = next((sex for sex, names in NAMES.items() if name in names), teller.pick(("f", "m")))
    if not name and teller.pick((True, False)):
        name = teller.pick(NAMES[gender or teller.pick(("f", "m"))])
        gender = gender or next(sex for sex, names in NAMES.items() if name in names)
    adjective = adjective or teller.pick(("", "little", "young", "curious", "small", "kind"))
    described = f"{adjective} {subject.noun}".strip()
    called = f"the {subject.noun}"
    slots = {"a_A": article(described) + (f" named {name}" if name else ""), "A": name or called, "theA": called}
    slots |= {"Ac": capital(slots["A"]), "theAc": capital(called)} | pronouns("", gender)
    return described, slots


def _scenery(teller: Teller, subject: Subject, setting: str) -> dict[str, str]:
    """Choose the places, the weather and the other small things of a story."""
    land = HABITATS[subject.habitat]
    friends = [friend for friend in land.friends if friend != subject.noun]
    friend = teller.pick(friends)
    other = teller.pick([noun for noun in friends if noun != friend])
    treasure = teller.pick(TREASURES)
    slots = {
        "place": setting or teller.pick(land.places),
        "spot": teller.pick(land.spots),
        "goal": teller.pick(land.goals),
        "food": teller.pick(land.foods),
        "habit": teller.pick(land.habits),
        "a_F": article(friend),
        "F": f"the {friend}",
        "Fc": f"The {friend}",
        "a_G": article(other),
        "G": f"the {other}",
        "Gc": f"The {other}",
        "weather": teller.pick(WEATHERS),
        "treasure": treasure,
        "the_treasure": "the " + treasure.split()[-1],
        "skill": teller.pick(SKILLS),
        "fear": teller.pick(FEARS),
    }
    trait = teller.pick(TRAITS)
    slots |= {"trait": trait, "trait2": teller.pick([word for word in TRAITS if word != trait])}
    return slots | {"placec": capital(slots["place"])}


def _tell(teller: Teller, slots: dict[str, str], plots: Sequence[Plot]) -> str:
    """Fill one plot: introduction, a line about the hero's character, the plot's steps, an ending."""
    steps = [INTROS, TRAIT_LINES, *teller.pick(plots), ENDINGS]
    return " ".join(teller.pick(step).format(**slots) for step in steps)


def _choose(rng: random.Random, subjects: Sequence[Subject]) -> Subject:
    """Choose a subject; those that people ask for most come up more often."""
    if rng.random() < 0.2:
        return rng.choice([subject for subject in subjects if subject.noun in FREQUENT])
    return rng.choice(subjects)


def _solo(rng: random.Random) -> StoryRequest:
    """A story about one hero, sometimes with an adjective, a name or a setting from the prompt."""
    subject = _choose(rng, ACTORS)
    if rng.random() < 0.15:
        subject = Subject(invented_word(rng), "animal", rng.choice(list(HABITATS)))
    adjective = rng.choice(ADJECTIVES) if rng.random() < 0.3 else ""
    name = rng.choice(NAMES[subject.gender or rng.choice("fm")]) if rng.random() < 0.15 else ""
    setting = rng.choice(SETTINGS) if rng.random() < 0.15 else ""
    teller = Teller(rng, subject.noun)
    _, slots = _cast(teller, subject, adjective, name)
    slots |= _scenery(teller, subject, setting)
    phrase = article(f"{adjective} {subject.noun}".strip())
    phrase += f" {rng.choice(('named', 'called'))} {name}" if name else ""
    return StoryRequest(f"{phrase} {setting}".strip(), _tell(teller, slots, SOLO_PLOTS))


def _named(rng: random.Random) -> StoryRequest:
    """A story about somebody of whom the prompt gives only the name."""
    gender = rng.choice("fm")
    name = rng.choice(NAMES[gender])
    subject = Subject("girl" if gender == "f" else "boy", "person", "town", gender)
    teller = Teller(rng, name)
    _, slots = _cast(teller, subject, "", name)
    return StoryRequest(name, _tell(teller, slots | _scenery(teller, subject, ""), SOLO_PLOTS))


def _duo(rng: random.Random) -> StoryRequest:
    """A story about two heroes, or about a hero and a thing."""
    subject = _choose(rng, ACTORS)
    others = THINGS if rng.random() < 0.5 else [actor for actor in ACTORS if actor != subject]
    return _with_partner(rng, subject, _choose(rng, others), named_in_prompt=True)


def _thing(rng: random.Random) -> StoryRequest:
    """A story about a thing; the hero who finds it is chosen by the story."""
    thing = _choose(rng, THINGS)
    hero = Teller(rng, "hero of " + thing.noun).pick([actor for actor in ACTORS if actor.habitat != "sea"])
    return _with_partner(rng, hero, thing, named_in_prompt=False)


def _with_partner(rng: random.Random, subject: Subject, partner: Subject, named_in_prompt: bool) -> StoryRequest:
    """Tell a story in which the partner matters as much as the hero."""
    teller = Teller(rng, f"{subject.noun}+{partner.noun}", fixed_share=0.5)
    _, slots = _cast(teller, subject, "", "")
    slots |= _scenery(teller, subject, "")
    gender = partner.gender if partner.kind != "person" else partner.gender or teller.pick(("f", "m"))
    adjective = rng.choice(ADJECTIVES) if rng.random() < 0.15 else ""
    slots |= {
        "a_B": article(f"{adjective} {partner.noun}".strip()),
        "B": f"the {partner.noun}",
        "Bc": f"The {partner.noun}",
    } | pronouns("b", gender)
    plots = THING_PLOTS[partner.habitat] if partner.kind == "thing" else DUO_PLOTS
    phrase = f"{article(subject.noun)} and {slots['a_B']}" if named_in_prompt else slots["a_B"]
    if named_in_prompt and rng.random() < 0.25:
        phrase = f"{slots['a_B']} and {article(subject.noun)}"
    return StoryRequest(phrase, _tell(teller, slots, plots))


def make_story(rng: random.Random) -> StoryRequest:
    """Return a story and the phrase by which a prompt asks for it."""
    makers = (_solo, _duo, _thing, _named)
    return rng.choices(makers, weights=(52, 30, 12, 6))[0](rng)
