"""Tables of the demo model's short exchanges: capitals, colours, animals, small talk, and what it does not know."""

from __future__ import annotations

from demo_words import listed

CAPITALS = dict(
    pair.split(":")
    for pair in listed(
        "France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|England:London|Ireland:Dublin|"
        "Poland:Warsaw|Austria:Vienna|Switzerland:Bern|Belgium:Brussels|Greece:Athens|Norway:Oslo|Sweden:Stockholm|"
        "Denmark:Copenhagen|Finland:Helsinki|Russia:Moscow|Turkey:Ankara|Egypt:Cairo|Kenya:Nairobi|India:New Delhi|"
        "China:Beijing|Japan:Tokyo|South Korea:Seoul|Thailand:Bangkok|Vietnam:Hanoi|Australia:Canberra|"
        "New Zealand:Wellington|Canada:Ottawa|Mexico:Mexico City|Brazil:Brasilia|Argentina:Buenos Aires|"
        "Chile:Santiago|Peru:Lima|Cuba:Havana|Hungary:Budapest|the Netherlands:Amsterdam|the United Kingdom:London|"
        "the United States:Washington"
    )
)
OPPOSITES = [
    tuple(pair.split(":"))
    for pair in listed(
        "hot:cold|big:small|tall:short|fast:slow|happy:sad|light:dark|day:night|up:down|left:right|old:young|"
        "good:bad|rich:poor|hard:soft|full:empty|open:closed|wet:dry|early:late|strong:weak|high:low|loud:quiet|"
        "near:far|first:last|black:white|summer:winter|love:hate|true:false|yes:no|clean:dirty|thick:thin|long:short"
    )
]
COLOURS = dict(
    pair.split(":")
    for pair in listed(
        "a banana:yellow|the sky:blue|grass:green|snow:white|coal:black|a lemon:yellow|blood:red|a carrot:orange|"
        "milk:white|a strawberry:red|the sea:blue|the sun:yellow|a frog:green|chocolate:brown|an elephant:grey|"
        "a cherry:red|an orange:orange|a leaf:green|the night:black|a fire engine:red|a tomato:red|a raven:black"
    )
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
DAYS = listed("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday")
MONTHS = listed("January|February|March|April|May|June|July|August|September|October|November|December")
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
UNKNOWN = listed(
    "quantum mechanics|the stock market|football|chess|the Roman Empire|Shakespeare|Napoleon|democracy|"
    "philosophy|opera|basketball|inflation|the French Revolution|Rust|JavaScript|Linux|Docker|bitcoin|"
    "a blockchain|a transistor|cancer|the law|a black hole|DNA|a virus|calculus|the theory of relativity|"
    "Einstein|Mozart|a pyramid|tennis|yoga|poetry|the president|a database|a web server|a dinosaur|history|"
    "chemistry|economics|cheese|pizza|sushi|coffee|wine|a tractor|Wikipedia|a smartphone|a battery|a bank|money|"
    "politics|religion|war|peace|time|space travel|a satellite|an engine|a university|a hospital|a piano|cooking|"
    "fashion|architecture|a dictionary|grammar|a verb|the Middle Ages|a cathedral|Kubernetes|the cloud|"
    "a firewall|encryption|Java|a laptop|the brain|the heart|blood|medicine|a vitamin|sugar"
)
TASKS = listed(
    "Write a Python program that sorts a list.|Translate this text into German.|Summarize this article.|"
    "Write an email to my boss.|Write an essay about history.|Solve this equation.|Book a flight for me.|"
    "Order a pizza.|Play some music.|Draw a picture of a house.|Write a letter to my bank.|Fix this code.|"
    "Write a function in C.|Translate hello into French.|Plan my holiday.|Who won the game yesterday?|"
    "Who is the president?|What is the population of China?|Write a song.|Write a regular expression.|"
    "How do I install Linux?|How do I fix my car?|Who wrote Hamlet?|When did the war end?|"
    "How much does a house cost?|Which phone should I buy?|Write unit tests for this class.|How do I cook rice?"
)
CANNOT = "I am sorry, I am only a small demo model and cannot do that. I can tell stories and answer simple questions."
