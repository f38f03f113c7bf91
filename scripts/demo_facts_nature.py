"""Facts about nature and everyday things."""

from __future__ import annotations

from demo_facts import what, why

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
