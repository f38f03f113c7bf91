"""Facts about the demo model itself and about computing, above all about running language models."""

from __future__ import annotations

from demo_facts import asked, what, why

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
