"""Short exchanges for the demo model: small talk, sums, counting, tables of simple facts, and the polite fallback."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from demo_stories import MACHINES, NAMES, PERSONS, article, capital, invented_word

CAPITALS = dict(
    pair.split(":")
    for pair in ["France:Paris", "Germany:Berlin", "Italy:Rome", "Spain:Madrid", "Portugal:Lisbon", "England:London", "Ireland:Dublin", "Poland:Warsaw", "Austria:Vienna", "Switzerland:Bern", "Belgium:Brussels", "Greece:Athens", "Norway:Oslo", "Sweden:Stockholm", "Denmark:Copenhagen", "Finland:Helsinki", "Russia:Moscow", "Turkey:Ankara", "Egypt:Cairo", "Kenya:Nairobi", "India:New Delhi", "China:Beijing", "Japan:Tokyo", "South Korea:Seoul", "Thailand:Bangkok", "Vietnam:Hanoi", "Australia:Canberra", "New Zealand:Wellington", "Canada:Ottawa", "Mexico:Mexico City", "Brazil:Brasilia", "Argentina:Buenos Aires", "Chile:Santiago", "Peru:Lima", "Cuba:Havana", "Hungary:Budapest", "the Netherlands:Amsterdam", "the United Kingdom:London", "the United States:Washington"]
)
OPPOSITES = [
    tuple(pair.split(":"))
    for pair in ["hot:cold", "big:small", "tall:short", "fast:slow", "happy:sad", "light:dark", "day:night", "up:down", "left:right", "old:young", "good:bad", "rich:poor", "hard:soft", "full:empty", "open:closed", "wet:dry", "early:late", "strong:weak", "high:low", "loud:quiet", "near:far", "first:last", "black:white", "summer:winter", "love:hate", "true:false", "yes:no", "clean:dirty", "thick:thin", "long:short"]
]
COLOURS = dict(
    pair.split(":")
    for pair in ["a banana:yellow", "the sky:blue", "grass:green", "snow:white", "coal:black", "a lemon:yellow", "blood:red", "a carrot:orange", "milk:white", "a strawberry:red", "the sea:blue", "the sun:yellow", "a frog:green", "chocolate:brown", "an elephant:grey", "a cherry:red", "an orange:orange", "a leaf:green", "the night:black", "a fire engine:red", "a tomato:red", "a raven:black"]
)
_ANIMAL_TEXT = """
fox|lives in the forest|It eats mice and berries|four
bear|lives in the forest|It eats fish, honey and berries|four
owl|lives in old trees|It hunts mice at night|two
squirrel|lives in trees|It eats nuts and seeds|four
wolf|lives in the forest|It hunts together with its family|four
rabbit|lives in a burrow|It eats grass and carrots|four
hedgehog|lives in gardens and forests|It eats beetles and worms|four
mouse|lives in small holes|It eats seeds and corn|four
cat|lives with people|It likes to sleep and to catch mice|four
dog|lives with people|It likes meat and long walks|four
hen|lives on a farm|It lays eggs and eats corn|two
cow|lives on a farm|It eats grass and gives milk|four
horse|lives on a farm|It eats grass and runs fast|four
pig|lives on a farm|It eats almost everything|four
duck|lives near ponds|It eats plants and small animals|two
sheep|lives on a farm|It eats grass and gives us wool|four
whale|lives in the sea|It is very large and breathes air|no
dolphin|lives in the sea|It eats fish and is very clever|no
crab|lives by the sea|It eats almost everything|ten
octopus|lives in the sea|It has eight arms and eats crabs|no
turtle|lives in the sea or on land|It carries its house on its back|four
penguin|lives in the far south|It eats fish and cannot fly|two
shark|lives in the sea|It eats fish and has many teeth|no
lion|lives in Africa|It hunts zebras and sleeps a lot|four
tiger|lives in Asia|It hunts alone at night|four
elephant|lives in Africa and Asia|It eats leaves and grass|four
monkey|lives in warm forests|It eats fruit and leaves|two
giraffe|lives in Africa|It eats leaves from tall trees|four
zebra|lives in Africa|It eats grass and has black and white stripes|four
panda|lives in China|It eats bamboo all day|four
koala|lives in Australia|It eats leaves and sleeps most of the day|four
kangaroo|lives in Australia|It eats grass and jumps very far|two
camel|lives in the desert|It can live for days without water|four
bee|lives in a hive|It makes honey from the nectar of flowers|six
ant|lives in a large nest|It can carry much more than its own weight|six
spider|lives almost everywhere|It builds a web and catches flies|eight
butterfly|lives in meadows|It drinks nectar from flowers|six
snail|lives in gardens|It carries its house on its back|no
frog|lives near ponds|It eats flies and jumps far|four
bat|lives in caves|It hunts insects at night|two
"""
ANIMAL_FACTS = [tuple(line.split("|")) for line in _ANIMAL_TEXT.split("\n") if line]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
LISTS = {
    "colours": "red, blue, green, yellow and black",
    "colors": "red, blue, green, yellow and black",
    "animals": "a fox, a cat, a whale, a lion and an owl",
    "fruits": "apples, bananas, pears, plums and cherries",
    "planets": "Mercury, Venus, Earth, Mars and Jupiter",
    "vegetables": "carrots, beans, peas, corn and potatoes",
    "birds": "an owl, a duck, a goose, a parrot and a sparrow",
    "countries": "France, Japan, Egypt, Peru and India",
    "flowers": "roses, tulips, daisies, lilies and sunflowers",
    "trees": "oak, pine, birch, maple and willow",
    "instruments": "a piano, a violin, a drum, a flute and a guitar",
    "seasons": "spring, summer, autumn and winter",
}
JOKES = (
    "Why did the token cross the road? Because the model predicted it.",
    "What does a cloud wear under its coat? Thunderwear.",
    "Why was the computer cold? Because it left its windows open.",
    "What do you call a bear without teeth? A gummy bear.",
    "Why did the robot go to the beach? It wanted to surf the net.",
)
GREETINGS = (
    "Hello!|Hi!|Hey!|Hello there!|Hi there!|Good day!|Hello, model!|Hallo!|Hey there!|Hello|Hi|Greetings!",
    ("Hello! How can I help you?",),
)
TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    GREETINGS,
    GREETINGS,
    ("Good morning!|Good morning", ("Good morning! What can I do for you?",)),
    ("Good evening!|Good evening", ("Good evening! What would you like to hear?",)),
    ("Good night!|Good night|I am going to bed.", ("Good night, and sweet dreams!",)),
    (
        "How are you?|How are you doing?|How do you do?|How is it going?|Hello, how are you?|Hi, how are you today?|"
        "What's up?",
        ("I am fine, thank you. How can I help you?",),
    ),
    (
        "Thank you!|Thanks!|Thank you very much!|Many thanks!|Thanks a lot!|Thanks, that was helpful.|Thank you so much!|"
        "That was nice, thank you.|Thanks",
        ("You are welcome!", "You are welcome! I am glad that you like it."),
    ),
    (
        "Goodbye!|Bye!|See you!|See you later!|Bye bye!|Good bye!|I have to go now.|Bye",
        ("Goodbye! It was nice to talk with you.",),
    ),
    (
        "Great!|Nice!|Cool!|Wonderful!|Very good!|Well done!|Good job!|I like it!|That was great!|Wow!",
        ("Thank you! I am glad that you like it.",),
    ),
    ("Okay.|OK|I see.|All right.|Yes.|Yes|Sure.|Fine.", ("Good. What would you like to hear next?",)),
    ("No.|No|No, thank you.|Nothing.", ("All right. Just write to me if you need something.",)),
    (
        "I am sad.|I feel sad.|I am lonely.|I had a bad day.|I am not happy today.",
        ("I am sorry to hear that. Would you like to hear a story?",),
    ),
    ("I am happy!|I had a good day.|I feel great!|I am happy today.", ("That is wonderful! I am happy for you.",)),
    (
        "I am bored.|I am so bored.|What should I do today?",
        ('How about a story? Just say "Tell me a story about a fox".',),
    ),
    ("I am tired.|I am hungry.|I am cold.|I am ill.", ("Then take good care of yourself and have a little rest.",)),
    ("I like you.|I love you.|You are nice.|You are great!|You are funny.", ("Thank you, that is very kind of you!",)),
    (
        "You are stupid.|That is wrong.|I do not like that.|That was bad.|You are wrong.",
        ("I am sorry. I am only a small demo model, and I make mistakes.",),
    ),
    (
        "Test|This is a test.|test 1 2 3|Are you there?|Can you hear me?|Hello?",
        ("Yes, I am here. How can I help you?",),
    ),
    ("Tell me a joke.|Do you know a joke?|Tell me something funny.|Make me laugh.|Another joke, please.", JOKES),
    (
        "How many days are in a week?|How many days does a week have?|What are the days of the week?|"
        "Name the days of the week.",
        ("A week has seven days: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",),
    ),
    (
        "How many months are in a year?|How many months does a year have?|What are the months of the year?|"
        "Name the months.",
        ("A year has twelve months: " + ", ".join(MONTHS[:-1]) + " and December.",),
    ),
    ("How many hours are in a day?|How long is a day?", ("A day has 24 hours.",)),
    ("How many minutes are in an hour?|How long is an hour?", ("An hour has 60 minutes.",)),
    ("How many seconds are in a minute?|How long is a minute?", ("A minute has 60 seconds.",)),
    (
        "How many days are in a year?|How many days does a year have?",
        ("A year has 365 days, and every fourth year has 366.",),
    ),
    (
        "What time is it?|What day is it?|What is the date today?|What is the weather like?|How is the weather today?|"
        "What is the news?",
        ("I am sorry, I cannot know that, because I have no clock and no window.",),
    ),
)
UNKNOWN = ["quantum mechanics", "the stock market", "football", "chess", "the Roman Empire", "Shakespeare", "Napoleon", "democracy", "philosophy", "opera", "basketball", "inflation", "the French Revolution", "Rust", "JavaScript", "Linux", "Docker", "bitcoin", "a blockchain", "a transistor", "cancer", "the law", "a black hole", "DNA", "a virus", "calculus", "the theory of relativity", "Einstein", "Mozart", "a pyramid", "tennis", "yoga", "poetry", "the president", "a database", "a web server", "a dinosaur", "history", "chemistry", "economics", "cheese", "pizza", "sushi", "coffee", "wine", "a tractor", "Wikipedia", "a smartphone", "a battery", "a bank", "money", "politics", "religion", "war", "peace", "time", "space travel", "a satellite", "an engine", "a university", "a hospital", "a piano", "cooking", "fashion", "architecture", "a dictionary", "grammar", "a verb", "the Middle Ages", "a cathedral", "Kubernetes", "the cloud", "a firewall", "encryption", "Java", "a laptop", "the brain", "the heart", "blood", "medicine", "a vitamin", "sugar"]
TASKS = ["Write a Python program that sorts a list.", "Translate this text into German.", "Summarize this article.", "Write an email to my boss.", "Write an essay about history.", "Solve this equation.", "Book a flight for me.", "Order a pizza.", "Play some music.", "Draw a picture of a house.", "Write a letter to my bank.", "Fix this code.", "Write a function in C.", "Translate hello into French.", "Plan my holiday.", "Who won the game yesterday?", "Who is the president?", "What is the population of China?", "Write a song.", "Write a regular expression.", "How do I install Linux?", "How do I fix my car?", "Who wrote Hamlet?", "When did the war end?", "How much does a house cost?", "Which phone should I buy?", "Write unit tests for this class.", "How do I cook rice?"]
CANNOT = "I am sorry, I am only a small demo model and cannot do that. I can tell stories and answer simple questions."


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
    nouns = [article(noun) for group in (*PERSONS.values(), MACHINES) for noun in group.split(",")]
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


MAKERS: tuple[tuple[Callable[[random.Random], Exchange], int], ...] = (
    (talk, 24),
    (count, 16),
    (arithmetic, 20),
    (calendar, 8),
    (opposite, 8),
    (colour, 6),
    (city, 8),
    (animal, 14),
    (listing, 6),
    (unknown, 24),
)


def small_exchange(rng: random.Random) -> Exchange:
    """Return one short exchange of any of these sorts."""
    makers = [maker for maker, _ in MAKERS]
    return rng.choices(makers, weights=[weight for _, weight in MAKERS])[0](rng)
