"""Words of the demo stories: who and what they are about, and what fits together in which place."""

from __future__ import annotations

from dataclasses import dataclass


def listed(text: str) -> list[str]:
    """Split a list of phrases at its bars."""
    return text.split("|")


@dataclass(frozen=True)
class Habitat:
    """What fits together in one kind of place, so that no whale climbs a tree."""

    places: tuple[str, ...]
    spots: tuple[str, ...]
    goals: tuple[str, ...]
    friends: tuple[str, ...]
    foods: tuple[str, ...]
    habits: tuple[str, ...]


HABITATS = {
    "forest": Habitat(
        (
            "in a deep green forest",
            "at the edge of an old forest",
            "in a cosy den under a big oak tree",
            "in a quiet valley full of pine trees",
        ),
        ("under a bush", "between two roots", "beside the stream", "under the fallen leaves"),
        ("the top of the high mountain", "the lake behind the hills", "the great waterfall", "the edge of the forest"),
        ("owl", "squirrel", "hedgehog", "rabbit", "deer", "badger", "mouse"),
        ("berries", "nuts", "mushrooms", "apples"),
        (
            "walked to the stream and listened to the birds",
            "looked for berries between the trees",
            "sat on a warm stone and watched the clouds",
        ),
    ),
    "farm": Habitat(
        ("on a small farm", "in a red barn near the village", "on a farm between two hills", "behind the old mill"),
        ("behind the barn", "in the hay", "under the fence", "beside the well"),
        ("the big market in the town", "the river behind the fields", "the top of the green hill", "the sea"),
        ("hen", "goat", "horse", "duck", "cat", "dog", "donkey"),
        ("corn", "apples", "carrots", "warm bread"),
        (
            "greeted the sun from the top of the fence",
            "took a long nap in the warm hay",
            "counted the clouds above the fields",
        ),
    ),
    "sea": Habitat(
        ("in the wide blue sea", "near a small rocky island", "in a quiet bay", "beside a bright coral reef"),
        ("on the white sand", "between two rocks", "in an old shipwreck", "under a flat stone"),
        ("the warm islands in the south", "the great coral reef", "the old shipwreck", "the edge of the ice"),
        ("crab", "dolphin", "turtle", "seal", "octopus", "starfish", "whale"),
        ("sea grass", "tiny shells", "green weeds", "little pearls of sugar"),
        (
            "watched the light dance on the waves",
            "listened to the song of the waves",
            "raced with the waves until noon",
        ),
    ),
    "wild": Habitat(
        ("on a wide sunny plain", "near a river in a warm land", "in a green jungle", "beside a quiet water hole"),
        ("in the tall grass", "under a palm tree", "beside the river", "behind a big rock"),
        ("the snowy mountain", "the great river", "the far end of the plain", "the hidden lake"),
        ("monkey", "elephant", "parrot", "zebra", "giraffe", "lion", "turtle"),
        ("sweet fruit", "ripe mangoes", "fresh leaves", "bananas"),
        (
            "walked to the water hole to drink",
            "rested in the shade of a tall tree",
            "watched the sun rise over the plain",
        ),
    ),
    "meadow": Habitat(
        ("in a sunny meadow", "in a garden full of flowers", "beside a small pond", "under a large green leaf"),
        ("under a leaf", "between the flowers", "beside the pond", "on a smooth stone"),
        ("the tallest sunflower", "the other side of the pond", "the top of the garden wall", "the apple tree"),
        ("bee", "ant", "butterfly", "snail", "frog", "cricket", "beetle"),
        ("honey", "sweet seeds", "fresh clover", "juicy berries"),
        (
            "drank a drop of dew from a flower",
            "said good morning to all the flowers",
            "sat in the grass and listened to the wind",
        ),
    ),
    "town": Habitat(
        (
            "in a small town by the river",
            "in a little house on the hill",
            "in a village near the sea",
            "in a narrow street with yellow lamps",
        ),
        ("under a bench", "on the old bridge", "in the garden", "at the side of the road"),
        ("the top of the mountain", "the city behind the hills", "the wide sea", "the old castle"),
        ("cat", "dog", "baker", "gardener", "neighbour", "teacher", "girl", "boy"),
        ("soup", "fresh bread", "apple cake", "biscuits"),
        (
            "opened the window and looked at the sky",
            "walked down to the river before breakfast",
            "wrote one line in a small blue book",
        ),
    ),
    "workshop": Habitat(
        (
            "in a bright workshop",
            "in a quiet factory at the edge of the city",
            "beside a busy harbour",
            "in a shed behind the railway station",
        ),
        ("under a workbench", "behind a pile of boxes", "at the side of the road", "in an empty box"),
        ("the far side of the city", "the top of the green hill", "the stars", "the wide sea"),
        ("engineer", "cat", "girl", "boy", "mouse", "pigeon", "clockmaker"),
        ("biscuits", "sandwiches", "red apples", "pancakes"),
        (
            "checked every wheel and every wire",
            "counted the boxes and swept the floor",
            "learned one new word from an old book",
        ),
    ),
    "magic": Habitat(
        (
            "in a tower above the clouds",
            "in a cave behind a waterfall",
            "in a land of mist and stars",
            "at the foot of a glowing mountain",
        ),
        ("beside a glowing stone", "under a silver tree", "in the mist", "at the foot of the tower"),
        ("the end of the rainbow", "the silver lake", "the highest star", "the land of snow"),
        ("owl", "cat", "wizard", "giant", "unicorn", "girl", "boy"),
        ("honey cake", "star fruit", "sweet plums", "golden apples"),
        ("lit a small green fire and sang", "polished the stars one by one", "told old tales to the wind"),
    ),
}

ANIMALS = {
    "forest": listed("fox|bear|owl|squirrel|deer|wolf|hedgehog|rabbit|badger|mouse|raccoon|moose|hare|beaver|otter"),
    "farm": listed("cat|dog|hen|goat|cow|horse|pig|duck|sheep|donkey|goose|rooster|pony|lamb|puppy|kitten|chick"),
    "sea": listed("whale|dolphin|crab|octopus|seal|turtle|penguin|fish|shark|starfish|seahorse|jellyfish|seagull"),
    "wild": listed("lion|tiger|elephant|monkey|giraffe|zebra|parrot|hippo|panda|koala|kangaroo|camel|crocodile|snake"),
    "meadow": listed(
        "bee|ant|butterfly|snail|spider|frog|ladybird|cricket|bat|beetle|worm|sparrow|caterpillar|toad|mole|bird"
    ),
}
PERSONS = {
    "f": listed("girl|queen|princess|witch|old woman|fairy|grandmother|mother|mermaid"),
    "m": listed("boy|king|prince|wizard|old man|knight|fisherman|postman|grandfather|father"),
    "": listed(
        "baker|sailor|farmer|teacher|gardener|painter|pirate|clockmaker|shepherd|astronaut|doctor|musician|scientist|"
        "engineer|programmer|child|captain|poet|student|dancer|cook|explorer|ninja|detective|writer|nurse|tailor"
    ),
}
MACHINES = listed(
    "robot|computer|train|boat|rocket|spaceship|tractor|drone|submarine|car|bus|toy|snowman|airplane|ship"
)
MAGIC = listed("dragon|unicorn|giant|ghost|monster|alien|elf|troll|dwarf|phoenix")
OBJECTS = listed(
    "lamp|clock|teapot|kite|violin|book|map|key|bicycle|mirror|lantern|piano|umbrella|bell|balloon|box|compass|"
    "telescope|radio|drum|guitar|hat|coin|ring|letter|candle|chair|cup|blanket|music box|camera|chip|sword|phone|"
    "flute|painting|coat|wheel|crown|doll"
)
LANDMARKS = listed(
    "lighthouse|tree|bridge|mountain|castle|garden|river|island|windmill|tower|well|house|apple tree|lake|"
    "library|cave|forest|village|school|harbour|volcano|desert|waterfall|hill|beach|palace|museum|ocean"
)
NAMES = {
    "f": listed("Mira|Anna|Lena|Rosa|Ida|Nora|Ella|Ruby|Luna|Maya|Sofia|Clara|Daisy|Emma|Lucy|Alice|Mary|Julia"),
    "m": listed("Tom|Ben|Leo|Max|Oscar|Finn|Rusty|Hugo|Theo|Sam|Otto|Milo|Jack|Paul|Peter|Noah|David|Karl"),
}
ADJECTIVES = listed(
    "little|small|young|brave|shy|clever|old|curious|kind|lonely|happy|tiny|friendly|lazy|hungry|magic|blue|red|"
    "green|golden|white|black|sad|big"
)
TRAITS = listed("kind|curious|brave|gentle|clever|patient|cheerful|quiet|honest|careful|shy")
WEATHERS = listed("cold and windy|warm and bright|grey and rainy|still and foggy|fresh and clear")
TREASURES = listed(
    "a silver key|a golden ring|a small blue bottle|a shiny coin|an old map|a red scarf|a little bell|"
    "a round glass stone"
)
SKILLS = listed("sing|dance|whistle|paint|tell stories|play the drum|juggle|count the stars")
FEARS = listed("the dark|thunder|deep water|strangers|loud noises|being alone")
SETTINGS = listed(
    "in the snow|on the moon|in the rain|at the beach|in the city|on an island|in winter|in a castle|"
    "in the desert|in the mountains|at night|in the forest|by the sea|in space"
)
SYLLABLES = listed(
    "ba|bo|bri|dor|del|fa|fli|gar|gim|ho|jo|ka|kel|lo|lu|mar|mi|nor|no|pa|pim|qui|ro|ru|sa|sil|ta|tor|vo|wim|za|zo"
)
