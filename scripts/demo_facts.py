"""Plain facts the demo model learns, each with the ways in which people ask for it.

A fact is (questions, first sentence, further sentences); a user who wants a brief answer gets the first sentence.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """One fact: all the questions that ask for it, and its answer in two parts."""

    questions: tuple[str, ...]
    short: str
    more: str

    @property
    def answer(self) -> str:
        """The whole answer."""
        return f"{self.short} {self.more}".strip()


def what(names: str, short: str, more: str = "") -> Fact:
    """A fact about a thing; names are its noun phrases, divided by bars."""
    forms = (
        "What is {}?",
        "What's {}?",
        "Explain {}.",
        "Tell me about {}.",
        "What does {} mean?",
        "Define {}.",
        "Can you explain {}?",
        "What do you know about {}?",
        "Please explain what {} is.",
        "What is {} exactly?",
        "Tell me what {} is.",
        "What is {} in simple words?",
        "Could you tell me what {} is?",
        "What is {} good for?",
    )
    questions = tuple(form.format(name) for name in names.split("|") for form in forms)
    return Fact(questions, short, more)


def why(question: str, statement: str, short: str, more: str = "") -> Fact:
    """A fact that answers a question; the statement is its form inside "Tell me ..."."""
    asked = f"{question[0].lower()}{question[1:]}?"
    forms = (
        f"{question}?",
        f"{question}?",
        f"Can you tell me {statement}?",
        f"Tell me {statement}.",
        f"Do you know {statement}?",
        f"Explain {statement}.",
        f"I wonder {statement}.",
        f"Please, {asked}",
    )
    return Fact(forms, short, more)


def asked(questions: str, short: str, more: str = "") -> Fact:
    """A fact whose questions are written out, divided by bars."""
    return Fact(tuple(questions.split("|")), short, more)


SELF = (
    asked(
        "Who are you?|What are you?|Tell me about yourself.|Introduce yourself.|Who am I talking to?|"
        "Who is this?|Please introduce yourself.|What is your job?",
        "I am the small demo model of staticllm.",
        "I can tell short stories, answer simple questions and count a little, but I do not know much.",
    ),
    asked(
        "What is your name?|What's your name?|How should I call you?|Do you have a name?|What are you called?",
        "I have no name of my own.",
        "I am the small demo model of staticllm.",
    ),
    asked(
        "What can you do?|How can you help me?|What are you able to do?|Help|Help me|What can I ask you?|"
        "What are you good at?|What should I ask you?|Can you help me?",
        "I can tell short stories, answer simple questions, count and do small sums.",
        'Try "Tell me a story about a fox" or "What is an NPU?"',
    ),
    asked(
        "How big are you?|How large are you?|How many parameters do you have?|What size are you?",
        "I am very small: I have about four and a half million parameters.",
        "Large language models have billions of them.",
    ),
    asked(
        "Are you a human?|Are you a person?|Are you a robot?|Are you real?|Are you alive?|Are you an AI?",
        "No, I am a very small language model, just a computer program.",
        "But I am happy to talk with you.",
    ),
    asked(
        "How were you trained?|Who made you?|Who trained you?|Where do you come from?|What were you trained on?|"
        "Who created you?",
        "I was trained from scratch by the staticllm project, on text that a small program generated.",
        "That is why I know only a few things.",
    ),
    asked(
        "Do you know everything?|Are you smart?|Are you clever?|Can I trust you?|Are you always right?",
        "No, I am a small demo model and I know only a few simple things.",
        "Please check anything that is important.",
    ),
    asked(
        "Where do you run?|Do you need the internet?|Are you running on my computer?|Where are you running?",
        "I run on your own computer, and I do not need the internet.",
        "The staticllm library runs me.",
    ),
    asked(
        "What is the meaning of life?|What is the answer to everything?|Why are we here?",
        "Some say that the answer is 42.",
        "I am too small to know, but kindness is a good start.",
    ),
    asked(
        "Do you have feelings?|Are you happy?|Are you sad?|Can you feel?|Do you sleep?|Do you dream?",
        "No, I have no feelings, because I am only a computer program.",
        "But thank you for asking.",
    ),
    asked(
        "How old are you?|When were you born?|When is your birthday?",
        "I have no age, because I am a computer program.",
        "I was trained in less than an hour.",
    ),
    asked(
        "What is your favourite colour?|What is your favorite color?|Which colour do you like best?",
        "I cannot see colours, but I like the word blue.",
        "What is yours?",
    ),
)

COMPUTING = (
    what(
        "an NPU|NPU|the NPU|a neural processing unit",
        "An NPU is a neural processing unit, a chip made for neural networks.",
        "It multiplies large matrices with little energy, and it likes programs whose shapes are fixed.",
    ),
    what(
        "a CPU|the CPU|a processor",
        "A CPU is the main processor of a computer.",
        "It runs all kinds of programs, one instruction after another, on a few fast cores.",
    ),
    what(
        "a GPU|the GPU|a graphics card",
        "A GPU is a processor for graphics with thousands of small cores.",
        "It does many simple calculations at the same time, so it is also good for neural networks.",
    ),
    what(
        "a KV cache|the KV cache|KV cache|a key value cache",
        "A KV cache keeps the keys and values of all tokens that a model has already seen.",
        "Thanks to the cache, the model does not have to compute them again for every new token.",
    ),
    what(
        "prefill|the prefill|the prefill phase",
        "Prefill is the first phase of text generation, in which the model reads the whole prompt.",
        "It handles many tokens at once and fills the KV cache.",
    ),
    what(
        "decode|decoding|the decode phase",
        "Decode is the second phase of text generation, in which the model writes one token at a time.",
        "Every new token is read back as the input of the next step.",
    ),
    what(
        "a token|tokens|tokenization",
        "A token is a small piece of text, often a word or a part of a word.",
        "A language model reads and writes tokens, and each token has a number.",
    ),
    what(
        "a tokenizer|the tokenizer",
        "A tokenizer cuts text into tokens and turns each token into a number.",
        "After generation, it turns the numbers back into text.",
    ),
    what(
        "a blob|blob|a compiled blob",
        "A blob is a model that has already been compiled for one device.",
        "It can be loaded quickly, because the slow compilation is done only once.",
    ),
    what(
        "a scheduler|the scheduler",
        "A scheduler decides which task runs next.",
        "In a language model server it decides which request gets the next step, so that nobody waits too long.",
    ),
    what(
        "a static shape|static shapes|a fixed shape",
        "A static shape means that all sizes of the inputs are known before the model is compiled.",
        "Devices such as NPUs need this, so shorter inputs are padded to the fixed size.",
    ),
    what(
        "a dynamic shape|dynamic shapes",
        "A dynamic shape means that the size of an input may change from call to call.",
        "It is flexible, but many NPUs cannot run it.",
    ),
    what(
        "padding",
        "Padding means filling up a short input until it has the fixed size.",
        "A mask tells the model to ignore the filled part.",
    ),
    what(
        "an attention mask|attention mask|a mask",
        "An attention mask tells a model which tokens it may look at.",
        "Padding and tokens of the future are masked out.",
    ),
    what(
        "attention|self-attention",
        "Attention is the part of a model that lets each token look at the other tokens.",
        "In this way the model finds out which words belong together.",
    ),
    what(
        "a transformer|transformers",
        "A transformer is a neural network that uses attention to understand text.",
        "Nearly all large language models are transformers.",
    ),
    what(
        "a language model|an LLM|LLM|a large language model",
        "A language model is a program that predicts the next token of a text.",
        "By doing this again and again, it can write whole answers and stories.",
    ),
    what(
        "staticllm|the staticllm library",
        "staticllm is a Python library that runs language models on devices with fixed shapes, such as NPUs.",
        "It uses OpenVINO, and I am its small demo model.",
    ),
    what(
        "OpenVINO|the OpenVINO toolkit",
        "OpenVINO is an open toolkit that runs neural networks fast on CPUs, GPUs and NPUs.",
        "It reads a model, compiles it for the device and runs it.",
    ),
    what(
        "a neural network|neural networks",
        "A neural network is a program made of many simple units in layers.",
        "It learns from examples by changing its weights step by step.",
    ),
    what(
        "machine learning",
        "Machine learning means that a program learns from examples instead of fixed rules.",
        "The more good examples it sees, the better it usually gets.",
    ),
    what(
        "artificial intelligence|AI",
        "Artificial intelligence means computer programs that do things which seem to need thinking.",
        "Examples are playing chess, understanding speech and writing text.",
    ),
    what(
        "quantization|a quantized model",
        "Quantization stores the weights of a model with fewer bits.",
        "The model becomes smaller and faster, and loses only a little quality.",
    ),
    what(
        "a batch|batching|the batch size",
        "A batch is a group of inputs that a model handles at the same time.",
        "A larger batch uses the device better, but each request may wait a little longer.",
    ),
    what(
        "chunked prefill|a prefill chunk",
        "Chunked prefill reads a long prompt in pieces of a fixed size.",
        "In this way a device with static shapes can handle prompts of any length.",
    ),
    what(
        "speculative decoding",
        "In speculative decoding, a small model guesses some tokens and the large model checks them all at once.",
        "If the guesses are right, the text is written faster.",
    ),
    what(
        "greedy decoding|greedy search",
        "Greedy decoding always takes the token with the highest probability.",
        "It gives the same answer every time.",
    ),
    what(
        "sampling",
        "Sampling chooses the next token by chance, so that likely tokens are chosen more often.",
        "It makes the text more varied than greedy decoding.",
    ),
    what(
        "temperature|the temperature of a model",
        "Temperature is a number that says how much chance there is in sampling.",
        "A low temperature gives safe answers, and a high temperature gives surprising ones.",
    ),
    what(
        "a prompt|the prompt",
        "A prompt is the text that you give to a language model.",
        "The model reads it and writes what should come next.",
    ),
    what(
        "an embedding|embeddings",
        "An embedding is a list of numbers that stands for a token or a text.",
        "Things with a similar meaning have similar numbers.",
    ),
    what(
        "latency",
        "Latency is the time you have to wait for an answer.",
        "For a language model, people often measure the time to the first token.",
    ),
    what(
        "throughput",
        "Throughput is the amount of work done in a given time.",
        "For a language model, it is measured in tokens per second.",
    ),
    what(
        "a context window|the context length",
        "The context window is the number of tokens a model can look at.",
        "If a text is longer, the oldest part has to be left out.",
    ),
    what(
        "a computer|computers",
        "A computer is a machine that follows instructions and works with numbers.",
        "With programs it can write, draw, play music and much more.",
    ),
    what(
        "a program|software|a computer program",
        "A program is a list of instructions for a computer.",
        "The computer follows them one after another, very fast.",
    ),
    what(
        "memory|RAM|computer memory",
        "Memory is the place where a computer keeps the data it is working on.",
        "It is fast, but most of it is empty again when the power is off.",
    ),
    what("a bit|bits", "A bit is the smallest piece of information, either zero or one.", "Eight bits make one byte."),
    what("a byte|bytes", "A byte is a group of eight bits.", "It can hold a number from 0 to 255."),
    what(
        "the internet|internet",
        "The internet is a network that connects computers all over the world.",
        "People use it to send messages, read and watch films.",
    ),
    what(
        "Python|the Python language",
        "Python is a programming language that is easy to read.",
        "Many people use it for science and for machine learning.",
    ),
    what(
        "a compiler|the compiler",
        "A compiler translates a program into a form that a machine can run.",
        "It also tries to make the program faster.",
    ),
    what(
        "an algorithm|algorithms",
        "An algorithm is a clear list of steps that solves a problem.",
        "A recipe for a cake is a simple algorithm.",
    ),
    what(
        "open source|open source software",
        "Open source means that everybody may read, use and change a program.",
        "Many people work on it together.",
    ),
    what(
        "a robot|robots",
        "A robot is a machine that can move and do work by itself.",
        "Robots build cars, clean floors and explore other planets.",
    ),
    why(
        "How does a language model work",
        "how a language model works",
        "A language model reads the text and gives every possible next token a probability.",
        "It takes one, adds it to the text and starts again.",
    ),
    why(
        "Why do NPUs need static shapes",
        "why NPUs need static shapes",
        "An NPU plans all its work before it starts, so it must know every size.",
        "With fixed shapes, it needs less energy and less time.",
    ),
    why(
        "What is the difference between prefill and decode",
        "the difference between prefill and decode",
        "Prefill reads the whole prompt at once, while decode writes one token at a time.",
        "Prefill needs much computing, and decode needs fast memory.",
    ),
    why(
        "Why is the KV cache useful",
        "why the KV cache is useful",
        "It saves the model from computing the same keys and values again.",
        "Without it, every new token would take longer than the last.",
    ),
)

NATURE = (
    what("the sun", "The sun is a star, a huge ball of hot gas.", "It gives light and warmth to the earth."),
    what(
        "the moon",
        "The moon is a ball of rock that travels around the earth.",
        "It shines because it reflects the light of the sun.",
    ),
    what("a star|stars", "A star is a huge ball of hot gas that shines by itself.", "The nearest star is the sun."),
    what(
        "a planet|planets",
        "A planet is a large round body that travels around a star.",
        "The earth is one of the eight planets of our sun.",
    ),
    what("the earth|earth", "The earth is the planet on which we live.", "Most of it is covered with water."),
    what(
        "Mars|the planet Mars",
        "Mars is the fourth planet from the sun.",
        "It is called the red planet, because its dust is full of rust.",
    ),
    what(
        "Jupiter|the planet Jupiter",
        "Jupiter is the largest planet of our sun.",
        "It is made mostly of gas and has a great red storm.",
    ),
    what("a galaxy|the Milky Way", "A galaxy is a huge group of stars.", "Our own galaxy is called the Milky Way."),
    what(
        "gravity",
        "Gravity is the force that pulls things towards each other.",
        "It keeps us on the ground and the moon near the earth.",
    ),
    what(
        "a rainbow|rainbows",
        "A rainbow is an arc of colours in the sky.",
        "It appears when sunlight shines through drops of rain.",
    ),
    what(
        "a cloud|clouds",
        "A cloud is made of very many tiny drops of water or ice.",
        "When the drops become heavy, they fall as rain.",
    ),
    what("rain", "Rain is water that falls from clouds.", "It gives water to plants, rivers and lakes."),
    what("snow", "Snow is made of small crystals of ice that fall from clouds.", "It falls when the air is very cold."),
    what("ice", "Ice is frozen water.", "It floats, because it is lighter than liquid water."),
    what(
        "wind|the wind", "Wind is moving air.", "It blows from places with high pressure to places with low pressure."
    ),
    what("thunder", "Thunder is the sound of lightning.", "The air gets so hot so fast that it makes a loud noise."),
    what(
        "lightning",
        "Lightning is a huge electric spark between clouds or between a cloud and the ground.",
        "It is much hotter than an oven.",
    ),
    what(
        "a volcano|volcanoes",
        "A volcano is a mountain with an opening to the hot rock deep in the earth.",
        "Sometimes hot lava and ash come out of it.",
    ),
    what(
        "an earthquake|earthquakes",
        "An earthquake is a shaking of the ground.",
        "It happens when large plates of rock suddenly move.",
    ),
    what("a river|rivers", "A river is a stream of water that flows through the land.", "Most rivers end in the sea."),
    what(
        "the ocean|the sea|an ocean",
        "The ocean is the salt water that covers most of the earth.",
        "It is home to whales, fish and many other animals.",
    ),
    what("a mountain|mountains", "A mountain is a very high piece of land.", "The highest one is Mount Everest."),
    what(
        "a desert|deserts",
        "A desert is a very dry place where it seldom rains.",
        "Only a few plants and animals can live there.",
    ),
    what(
        "a forest|forests",
        "A forest is a large area full of trees.",
        "It is home to many animals and gives us clean air.",
    ),
    what("a tree|trees", "A tree is a tall plant with a trunk of wood.", "It takes in sunlight and gives us oxygen."),
    what(
        "a flower|flowers", "A flower is the part of a plant that makes seeds.", "Its colours and smell attract bees."
    ),
    what(
        "photosynthesis",
        "Photosynthesis is how plants make sugar from light, water and air.",
        "In doing so, they give off oxygen.",
    ),
    what(
        "water",
        "Water is a clear liquid that all living things need.",
        "It freezes at 0 degrees and boils at 100 degrees Celsius.",
    ),
    what("air|the air", "Air is a mixture of gases, mostly nitrogen and oxygen.", "We need the oxygen to breathe."),
    what("fire", "Fire is a hot and bright reaction of something with oxygen.", "It needs fuel, air and heat."),
    what("light", "Light is a kind of energy that we can see.", "Nothing in the world is faster than light."),
    what(
        "sound",
        "Sound is a wave that travels through air, water or solid things.",
        "Our ears turn it into what we hear.",
    ),
    what("electricity", "Electricity is the flow of tiny charged particles.", "It powers lamps, trains and computers."),
    what(
        "a magnet|magnets|magnetism", "A magnet is a thing that attracts iron.", "It has a north pole and a south pole."
    ),
    what(
        "an atom|atoms",
        "An atom is one of the tiny parts of which all things are made.",
        "It has a small core with electrons around it.",
    ),
    what("energy", "Energy is the ability to do work.", "It can change its form, but it never gets lost."),
    what(
        "a lighthouse|lighthouses",
        "A lighthouse is a tower with a bright light near the sea.",
        "It shows ships the way at night.",
    ),
    what("bread", "Bread is a food made of flour, water and yeast.", "It is baked in a hot oven."),
    what("music", "Music is sound that people arrange in a beautiful way.", "It has melody and rhythm."),
    what("a book|books", "A book is a set of pages with text or pictures.", "People read it to learn or for fun."),
    what("a friend|friendship", "A friend is somebody you like and trust.", "Good friends help each other."),
    what("love", "Love is a deep and warm feeling for somebody.", "It makes people care for each other."),
    why(
        "Why is the sky blue",
        "why the sky is blue",
        "The sky is blue because the air scatters blue light more than red light.",
        "So blue light from the sun reaches our eyes from all directions.",
    ),
    why(
        "Why is the sunset red",
        "why the sunset is red",
        "In the evening, sunlight travels a long way through the air.",
        "Most of the blue light is scattered away, and the red light is left.",
    ),
    why(
        "Why is grass green",
        "why grass is green",
        "Grass is green because of chlorophyll.",
        "It takes in red and blue light and reflects the green.",
    ),
    why(
        "Why is the sea salty",
        "why the sea is salty",
        "Rivers carry small amounts of salt from rocks into the sea.",
        "The water evaporates, but the salt stays.",
    ),
    why(
        "Why does it rain",
        "why it rains",
        "It rains when the drops of water in a cloud become too heavy.",
        "Then they fall to the ground.",
    ),
    why(
        "Why does ice float",
        "why ice floats",
        "Ice floats because it is lighter than the same amount of water.",
        "Water grows a little when it freezes.",
    ),
    why(
        "Why do leaves fall in autumn",
        "why leaves fall in autumn",
        "Trees drop their leaves to save water in the cold months.",
        "In spring they grow new ones.",
    ),
    why(
        "Why do leaves change colour",
        "why leaves change colour",
        "In autumn the green chlorophyll goes away.",
        "Then we can see the yellow and red colours below it.",
    ),
    why(
        "Why do we sleep",
        "why we sleep",
        "We sleep so that body and brain can rest.",
        "While we sleep, the brain also sorts what we have learned.",
    ),
    why(
        "Why do we have seasons",
        "why we have seasons",
        "We have seasons because the axis of the earth is tilted.",
        "In summer our half of the earth leans towards the sun.",
    ),
    why(
        "Why do we have day and night",
        "why we have day and night",
        "The earth turns around once every 24 hours.",
        "It is day on the side that faces the sun.",
    ),
    why(
        "Why do stars twinkle",
        "why stars twinkle",
        "Stars twinkle because their light passes through moving air.",
        "Seen from space, they do not twinkle.",
    ),
    why(
        "Why do birds fly south",
        "why birds fly south",
        "Many birds fly south in autumn because there is little food in winter.",
        "In spring they come back.",
    ),
    why(
        "Why do cats purr",
        "why cats purr",
        "Cats mostly purr when they feel safe and happy.",
        "Sometimes they also purr to calm themselves.",
    ),
    why(
        "How do birds fly",
        "how birds fly",
        "Birds fly by moving their wings, which push the air down.",
        "Their bones are light, and their feathers are smooth.",
    ),
    why(
        "How do fish breathe", "how fish breathe", "Fish breathe with gills.", "The gills take oxygen out of the water."
    ),
    why(
        "How do bees make honey",
        "how bees make honey",
        "Bees collect sweet nectar from flowers.",
        "In the hive they dry it until it becomes honey.",
    ),
    why(
        "How do planes fly",
        "how planes fly",
        "The wings of a plane push air down as it moves forward, and this lifts it up.",
        "The engines give it the speed it needs.",
    ),
    why(
        "How far away is the moon",
        "how far away the moon is",
        "The moon is about 384,000 kilometres away.",
        "Light needs a little more than one second for that.",
    ),
    why(
        "How far away is the sun",
        "how far away the sun is",
        "The sun is about 150 million kilometres away.",
        "Its light needs about eight minutes to reach us.",
    ),
    why("How fast is light", "how fast light is", "Light travels about 300,000 kilometres in one second."),
    why("How fast is sound", "how fast sound is", "Sound travels about 340 metres per second in air."),
    why(
        "How many planets are there",
        "how many planets there are",
        "There are eight planets around our sun.",
        "They are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.",
    ),
    why("What is the largest planet", "which planet is the largest", "Jupiter is the largest planet of our sun."),
    why(
        "What is the largest animal",
        "which animal is the largest",
        "The blue whale is the largest animal in the world.",
        "It can be thirty metres long.",
    ),
    why(
        "What is the fastest animal",
        "which animal is the fastest",
        "The fastest animal on land is the cheetah.",
        "The fastest bird is the peregrine falcon.",
    ),
    why(
        "What is the tallest animal",
        "which animal is the tallest",
        "The giraffe is the tallest animal.",
        "It can be more than five metres tall.",
    ),
    why(
        "What is the highest mountain",
        "which mountain is the highest",
        "The highest mountain in the world is Mount Everest.",
        "It is almost 8,850 metres high.",
    ),
    why(
        "What is the longest river",
        "which river is the longest",
        "The Nile and the Amazon are the longest rivers in the world.",
        "Both are more than 6,000 kilometres long.",
    ),
    why(
        "What is the largest ocean",
        "which ocean is the largest",
        "The largest ocean is the Pacific Ocean.",
        "It covers almost a third of the earth.",
    ),
    why(
        "How do I boil an egg",
        "how to boil an egg",
        "Put the egg into boiling water for about eight minutes.",
        "Then cool it with cold water.",
    ),
    why(
        "How do I make tea",
        "how to make tea",
        "Boil some water, pour it over the tea and wait for three to five minutes.",
        "Add milk or lemon if you like.",
    ),
    why(
        "How do I sleep better",
        "how to sleep better",
        "Go to bed at the same time every day and keep the room dark and quiet.",
        "A short walk in the evening helps too.",
    ),
)

FACTS = SELF + COMPUTING + NATURE
