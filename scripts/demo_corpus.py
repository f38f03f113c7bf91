"""Training text of the demo model, generated on the fly: no download, nobody else's text, and the same for a seed.

A document is a list of chat messages, or one plain text for prompts that use no chat template.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from demo_smalltalk import Exchange, introduction, small_exchange
from demo_stories import StoryRequest, capital, make_story
from demo_text import COMPUTING, NATURE, PROMPTS, SELF

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("system", "user", "assistant")
FACTS = SELF + COMPUTING + NATURE
SPECIAL_TOKENS = [BOS, EOS, PAD, *(f"<|{role}|>" for role in ROLES)]
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '</s>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

MORE_ANSWER, *_ = PROMPTS.lines("more answer")
Message = dict[str, str]


@dataclass(frozen=True)
class Mix:
    """Shares of the sorts of text: stories of all exchanges, facts of the others; practice favours hard sorts."""

    stories: float
    facts: float
    practice: bool = False


GENERAL = Mix(stories=0.3, facts=0.5)
PRACTICE = Mix(stories=0.12, facts=0.32, practice=True)
BALANCED = Mix(stories=0.25, facts=0.4, practice=True)


def _roughen(rng: random.Random, question: str) -> str:
    """Write a question as people type it: sometimes without capitals, full stop or question mark."""
    if rng.random() < 0.12:
        question = question.lower()
    if rng.random() < 0.2:
        question = question.rstrip(".?!")
    if rng.random() < 0.04:
        question = f"Please, {question[0].lower()}{question[1:]}" if question else question
    return question


def _ask_fact(rng: random.Random) -> Exchange:
    """A question about one of the facts."""
    fact = rng.choice(FACTS)
    return Exchange(rng.choice(fact.questions), fact.answer, fact.short)


def _ask_story(rng: random.Random) -> Exchange:
    """A wish for a story, nearly always with its subject."""
    story = make_story(rng)
    if rng.random() < 0.06:
        return Exchange(rng.choice(PROMPTS.lines("any story")), story.text)
    return Exchange(rng.choice(PROMPTS.lines("story")).format(story.phrase), story.text)


def _exchange(rng: random.Random, mix: Mix) -> Exchange:
    """One exchange of the mix."""
    draw = rng.random()
    if draw < mix.stories:
        return _ask_story(rng)
    if draw < mix.stories + (1 - mix.stories) * mix.facts:
        return _ask_fact(rng)
    return small_exchange(rng, mix.practice)


def _system(rng: random.Random) -> tuple[str, str, bool]:
    """Return a system prompt, what it puts in front of each answer, and whether it asks for brief answers."""
    draw = rng.random()
    if draw < 0.55:
        return rng.choice(PROMPTS.lines("neutral system")), "", False
    if draw < 0.75:
        return rng.choice(PROMPTS.lines("brief system")), "", True
    if draw < 0.9:
        return rng.choice(PROMPTS.lines("pirate system")), "Arr, matey! ", False
    return rng.choice(PROMPTS.lines("cheerful system")), "With pleasure! ", False


def _dialogue(rng: random.Random, turns: int, mix: Mix) -> Iterator[Exchange]:
    """The exchanges of one conversation, sometimes with the user's name, which is asked for later."""
    named, name_at, ask_at = turns > 1 and rng.random() < 0.2, 0, rng.randint(1, max(1, turns - 1))
    hello, question = introduction(rng)
    for turn in range(turns):
        if named and turn in (name_at, ask_at):
            yield hello if turn == name_at else question
        elif turn and rng.random() < 0.07:
            yield Exchange(rng.choice(PROMPTS.lines("more")), MORE_ANSWER)
        else:
            yield _exchange(rng, mix)


def conversation(rng: random.Random, turns: int, mix: Mix) -> list[Message]:
    """Return one conversation, a third of them with a system prompt that the answers follow."""
    messages: list[Message] = []
    prefix, brief = "", False
    if rng.random() < 0.3:
        system, prefix, brief = _system(rng)
        messages.append({"role": "system", "content": system})
    for exchange in _dialogue(rng, turns, mix):
        answer = prefix + (exchange.brief if brief and exchange.brief else exchange.assistant)
        messages.append({"role": "user", "content": _roughen(rng, exchange.user)})
        messages.append({"role": "assistant", "content": answer})
    return messages


def prose(rng: random.Random) -> str:
    """Return a text without a chat: a story, or a few facts one after another."""
    if rng.random() < 0.6:
        story: StoryRequest = make_story(rng)
        return f"{capital(story.phrase)}\n\n{story.text}" if rng.random() < 0.1 else story.text
    return " ".join(fact.answer for fact in rng.sample(COMPUTING + NATURE, rng.randint(1, 4)))


def render(messages: list[Message]) -> str:
    """Write a conversation as the chat template does, without loading a template engine."""
    return BOS + "".join(f"<|{message['role']}|>{message['content']}{EOS}" for message in messages)


def document(rng: random.Random, mix: Mix = GENERAL, long: bool = False) -> str:
    """Return one training document; long ones are conversations of many turns."""
    if long:
        turns = rng.randint(8, 30)
        share = rng.choice((0.1, 0.3, 0.6))
        return render(conversation(rng, turns, mix if mix.practice else replace(mix, stories=share)))
    if rng.random() < 0.12:
        return BOS + prose(rng) + EOS
    turns = rng.choices((1, 2, 3, 4), weights=(62, 18, 12, 8))[0]
    return render(conversation(rng, turns, mix))
