"""Sentences of the demo stories. A plot is a list of steps; a step is a list of alternatives with slots.

Slots: {A} the hero's name or "the fox", {theA} always "the fox", {a_A} how the hero is introduced; {he}, {him},
{his}, {himself} the hero's pronouns; {B} the partner (with {bhe} and so on); {F} and {G} two friends. A small "c"
after a slot's name means that it starts a sentence.
"""

from __future__ import annotations

Plot = tuple[tuple[str, ...], ...]

INTROS = (
    "Once upon a time, there was {a_A} who lived {place}.",
    "Once upon a time, {a_A} lived {place}.",
    "Long ago, there was {a_A} who lived {place}.",
    "There was once {a_A}, and {his} home was {place}.",
    "{placec}, there lived {a_A}.",
)

TRAIT_LINES = (
    "{Ac} was {trait} and {trait2}, and every morning {he} {habit}.",
    "Everybody knew that {A} was very {trait}.",
    "Every day {theA} {habit}.",
    "{Ac} was {trait}, but sometimes {he} felt a little lonely.",
)

ENDINGS = (
    "From that day on, {A} was never lonely again.",
    "That night {A} slept well and dreamed of new adventures.",
    "And so {A} learned that a kind heart is the best treasure.",
    "And if you go there today, you may still hear {him} laugh.",
    "{Ac} smiled, because {he} knew that this was the best day of all.",
    "And they all lived happily for many years.",
)

SOLO_PLOTS: tuple[Plot, ...] = (
    (  # lost and found again
        (
            "One day {theA} went too far from home and lost the way.",
            "One evening a thick fog came, and {A} could not find the way home.",
        ),
        ("{He} looked left and right, but everything looked strange.", "It grew dark, and {he} began to feel afraid."),
        ('Then {a_F} came by and asked, "Why are you so sad?"', "Just then {a_F} heard {him} and stopped."),
        ('"I want to go home," said {theA}, "but I do not know the way."',),
        (
            '{Fc} said, "Follow me, I know every path," and they went together until they saw the lights of home.',
            '{Fc} pointed to the brightest star and said, "Keep the star in front of you." Soon {A} was home again.',
        ),
        ("{Ac} thanked {F} and shared some {food} with {F}.", "{Ac} was so happy that {he} danced."),
    ),
    (  # found treasure goes back to its owner
        ("One morning {A} found {treasure} {spot}.", "On a {weather} day, {theA} found {treasure} {spot}."),
        ('"Somebody must be looking for this," {he} thought.', "It was beautiful, but it did not belong to {him}."),
        (
            "{He} asked {F}, but {F} only shook a sleepy head.",
            "First {he} asked {F}, but {F} had never seen it before.",
        ),
        ("Then {he} asked {G}, and {G} jumped for joy.", "At last {he} met {a_G} who was searching everywhere."),
        (
            '"That is mine!" said {G}. "I lost it many days ago. Thank you!"',
            '"You found it!" cried {G}. "How can I thank you?"',
        ),
        ("As a gift, {G} gave {A} a basket of {food}.", "From then on, {A} and {G} were good friends."),
    ),
    (  # the storm
        (
            "One night a great storm came, and the wind shook everything.",
            "One day the sky turned black, and it rained for hours.",
        ),
        (
            "{Ac} was safe and dry, but then {he} heard a small voice outside.",
            "{Ac} wanted to sleep, but somebody was calling for help.",
        ),
        ("It was {a_F}, wet and cold.", "Outside stood {a_F} who had no place to hide."),
        (
            '"Come in," said {theA}. "There is room for two."',
            '"You can stay with me," said {A}, and {he} made room at once.',
        ),
        (
            "They ate {food}, told stories and waited until the storm was over.",
            "Soon {a_G} came too, and they all kept each other warm.",
        ),
        (
            "In the morning the sun came out, and there was a rainbow in the sky.",
            "When the sun came back, they were the best of friends.",
        ),
    ),
    (  # practice
        ("More than anything, {A} wanted to learn to {skill}.", "{Ac} had one big dream: {he} wanted to {skill}."),
        ("The first time {he} tried, everybody laughed.", "At first it did not go well at all."),
        (
            '{Ac} felt sad, but {F} said, "Try a little every day."',
            '"Do not give up," said {F}. "Nobody is good at the start."',
        ),
        ("So {theA} practised every morning and every evening.", "So {he} tried again and again, day after day."),
        (
            "When the summer feast came, {A} was ready, and this time everybody listened and cheered.",
            "One day {G} asked {him} to show it to everybody, and it was wonderful.",
        ),
        ('"You see," said {F}, "small steps can take you far."', "{Ac} was very proud of {himself}."),
    ),
    (  # courage
        ("There was only one problem: {A} was afraid of {fear}.", "But {A} had a secret: {he} was afraid of {fear}."),
        ("One day {F} did not come home.", "One {weather} evening, {a_F} called for help from far away."),
        (
            "{Ac} knew that somebody had to help, and there was nobody else.",
            "{Ac}'s heart beat fast, but {he} did not run away.",
        ),
        ("{He} took a deep breath and went out to look for {F}.", '"I am afraid," {he} said, "but I will go."'),
        ("At last {he} found {F} and they came home together.", "{He} found {F}, and together they came back safely."),
        ('"You are the bravest friend I know," said {F}.', "After that, {fear} did not seem so terrible."),
    ),
    (  # a seed
        ("One spring day {A} found a tiny seed {spot}.", "One day {F} gave {A} a tiny seed."),
        ("{He} put it into the ground and gave it water every day.", "{He} planted it in a sunny place and waited."),
        ("Days went by, and nothing happened.", '"Nothing will grow there," said {G}.'),
        (
            "But {theA} was patient, and one morning there was a small green leaf.",
            "But {A} did not give up, and at last a green leaf came out.",
        ),
        (
            "The leaf became a plant, and the plant became a tall tree.",
            "By summer it was full of flowers, and the bees came from far away.",
        ),
        ("{Ac} shared its fruit with everybody.", "All the friends came to sit in its shade."),
    ),
    (  # one good turn deserves another
        ("One day {A} heard a cry {spot}.", "On a {weather} day, {theA} heard somebody crying."),
        ("There was {a_F} who could not move.", "It was {a_F} who was caught in an old net."),
        ("{Ac} worked for a long time until {F} was free.", '"Keep still," said {A}, and {he} set {F} free.'),
        ('"Thank you," said {F}. "One day I will help you too."',),
        (
            "Some weeks later, {theA} fell into a deep hole and could not get out.",
            "When winter came, {A} had nothing left to eat.",
        ),
        ("{Fc} remembered, came at once and brought help.", "Then {F} came with a big basket of {food} and a smile."),
    ),
    (  # a journey
        ("One day {A} decided to see {goal}.", "{Ac} had always wanted to see {goal}."),
        ('"It is too far," said {F}, but {theA} set off anyway.', "{He} packed some {food} and set off at sunrise."),
        ("The way was long, and the weather was {weather}.", "{He} travelled for three days and three nights."),
        (
            "On the way {he} met {a_G}, and they went on together.",
            "When {he} was tired, {he} rested under the stars and sang a little song.",
        ),
        ("At last {he} stood there and saw {goal}.", "And then, one morning, there it was: {goal}."),
        (
            "It was even more beautiful than in {his} dreams.",
            "{He} stayed for a while and then went home to tell everybody about it.",
        ),
    ),
    (  # a strange sound
        ("One night {A} heard a strange sound {spot}.", "One night something went tap, tap, tap {spot}."),
        ('"Who is there?" {he} asked, but nobody answered.', "{He} wanted to hide, but {he} was too curious."),
        ("So {he} went to look, one small step at a time.", "{Ac} woke {F}, and together they went to look."),
        ("There sat {a_G} who was trying to open a box.", "It was only {a_G} who could not sleep."),
        ('"I am sorry," said {G}. "I did not want to wake you."', "They looked at each other and began to laugh."),
        (
            "They drank something warm and talked until the morning.",
            '"Next time," said {theA}, "just knock, and I will make us some {food}."',
        ),
    ),
    (  # a gift
        ("It was the birthday of {F}, and {A} had no gift.", "{Ac} wanted to make a gift for {F}."),
        ("{He} had no money and not much time.", "{He} thought about it all day long."),
        ("First {he} looked {spot}, but there was nothing.", '"What do friends really need?" {he} asked {G}.'),
        ("Then {theA} had a good idea.", "Then {G} whispered something, and {A} smiled."),
        (
            "{He} made a song about their best days and sang it for {F}.",
            "{He} collected {food} and called all the friends together for a feast.",
        ),
        ('"This is the best gift of my life," said {F}.', "{Fc} was so happy that nobody wanted to go home."),
    ),
)

DUO_PLOTS: tuple[Plot, ...] = (
    (  # a meeting
        ("One {weather} day, {A} met {a_B}.", "One day {a_B} came by and looked very tired."),
        ("At first {B} was shy and did not say a word.", '"Who are you?" asked {A}. "I have never met you before."'),
        ("{Ac} offered {B} some {food}, and soon they began to talk.", '"I am looking for a friend," said {B}.'),
        ("They found out that they both loved the stars.", '"Then you can stop looking," said {theA}.'),
        (
            "The next day {theA} and {B} set off together to see {goal}.",
            "After that, {theA} and {B} met every day and shared everything.",
        ),
    ),
    (  # a quarrel
        ("{Ac} had a good friend, {a_B}.", "Not far away lived {a_B}, and the two were good friends."),
        ("But one day they both found {treasure} {spot}.", "One day they both wanted to have {treasure}."),
        ('"It is mine!" said {theA}. "No, it is mine!" said {B}.',),
        ("They were angry and did not speak for three days.", "{Bc} went home without a word, and {A} felt terrible."),
        (
            'Then {A} went to {B} and said, "I am sorry. You are more important than any treasure."',
            'Then {B} came back and said, "I miss you more than I want the treasure."',
        ),
        (
            "They gave {the_treasure} to {a_G} who needed it more.",
            "They laughed and shared {the_treasure} from then on.",
        ),
    ),
    (  # a rescue
        ("One day {B} was in trouble.", "One {weather} morning, {A} heard a voice. It was {a_B}."),
        ('"Help me, please," called {B}. "I am stuck and cannot get out!"',),
        ("{Ac} did not wait.", "{Ac} thought for a moment and had an idea."),
        (
            "{He} called {F}, and together they pulled and pulled until {B} was free.",
            "{He} brought a long rope, and soon {B} was free.",
        ),
        ('"How can I thank you?" asked {B}. "Just be my friend," said {theA}.',),
        ("From then on, {theA} and {B} helped each other every day.", "Now {theA} and {B} do everything together."),
    ),
    (  # building together
        ("{His} best friend was {a_B}.", "One day {A} met {a_B} who had a big plan."),
        ('"Let us build a boat," said {B}.', '"Let us build a small house for everybody," said {B}.'),
        (
            "{Ac} was strong, and {B} was clever, so they were a good team.",
            "{Ac} brought the wood, and {B} knew how to use it.",
        ),
        ("On the first day everything fell down.", "It was hard work, and once it all fell apart."),
        ("But {theA} and {B} laughed and began again.", '"We will try again," said {theA}, and {B} agreed.'),
        (
            "After a week it was finished, and all the neighbours came to see it.",
            "When it was done, they sat down together and ate {food}.",
        ),
    ),
    (  # a race
        ("One day {A} and {a_B} had a race to see {goal} first.", 'One day {a_B} said to {A}, "I am faster than you."'),
        ("{Bc} was fast, but {theA} was patient.", '"Let us see," said {theA}, and off they went.'),
        ("Halfway there, they met {a_F} who had hurt a foot.", "In the middle of the race they heard {a_F} cry."),
        (
            "{Ac} stopped to help, and {B} came back to help too.",
            "Both of them stopped, and nobody thought of winning.",
        ),
        ("In the end they arrived at the same time, side by side.", "So {theA} and {B} finished the race together."),
        ('"We both won," said {B}.', '"A friend is better than a prize," said {B}.'),
    ),
)

_OBJECT_PLOTS: tuple[Plot, ...] = (
    (  # found and mended
        ("One day {A} found {a_B} {spot}.", "On a {weather} day, {theA} found {a_B} {spot}."),
        ("{Bc} was old and dusty, and nobody wanted it any more.", "{Bc} was broken, and it looked very sad."),
        ('"I will take care of you," said {A}.', '"Everything can be mended," thought {theA}.'),
        (
            "{He} cleaned it with a soft cloth and worked on it all night long.",
            "{He} asked {F} for help, and together they mended {B}.",
        ),
        ("In the morning {B} was as good as new.", "At last {B} was shining like a star."),
        ("Everybody came to see it, and {A} was very proud.", "{Ac} took {B} along wherever {he} went."),
    ),
    (  # the owner
        ("One morning there was {a_B} in front of the door.", "{Ac} found {a_B} {spot} and wondered whose it was."),
        ("{Ac} asked {F}, but {F} did not know whose it was.", 'On the back somebody had written: "Take me home."'),
        ("So {theA} took {B} and set off to find the owner.", "So {A} carried {B} from door to door."),
        ("After a long way {he} met {a_G} who was crying.", "At the last house lived {a_G}."),
        (
            '"There it is!" cried {G}. "I thought I would never see it again."',
            '"That was a gift from my grandmother," said {G}. "Thank you for bringing it back."',
        ),
        ("{Ac} was happy that {B} was home again.", "{Gc} let {A} use {B} whenever {he} wanted."),
    ),
    (  # the magic thing
        ("{Ac} owned {a_B} that was very special.", "One day {F} gave {A} {a_B}."),
        ("At midnight {B} began to glow with a soft light.", "When {he} touched {B}, it began to speak."),
        ('"You have one wish," said a quiet voice.', '"I can show you one secret," it said.'),
        (
            "{Ac} thought of gold, but then {he} thought of {F} who was ill.",
            "{Ac} could have asked for anything in the world.",
        ),
        ('"I wish that my friends are well and happy," said {theA}.',),
        (
            "{Bc} shone once more, and the wish came true.",
            "The next morning all the friends came, and they had a feast.",
        ),
    ),
)

_LANDMARK_PLOTS: tuple[Plot, ...] = (
    (  # the light in the storm
        ("Not far away there was {a_B}, and {theA} loved it very much.", "Every day {A} went to look at {a_B}."),
        (
            "One night a great storm came, and everything was dark.",
            "One night the wind was so strong that nobody slept.",
        ),
        (
            "{Ac} was worried about {B}, so {he} went there with a lantern.",
            '"I must look after {B}," said {theA}, and {he} went out into the rain.',
        ),
        (
            "There {he} heard a voice: it was {a_F} who had lost the way in the dark.",
            "Near {B} sat {a_F}, cold and afraid.",
        ),
        (
            "{Ac} held the lantern high until the storm was over.",
            "{Ac} lit a lamp at {B} so that everybody could see it from far away.",
        ),
        (
            "In the morning all the neighbours thanked {A}, and {B} looked more beautiful than ever.",
            "After that, {A} kept a light at {B} every night.",
        ),
    ),
    (  # the forgotten place
        ("One day {A} discovered {a_B} that nobody remembered.", "Far away there was {a_B} where nobody ever went."),
        (
            "People said that {B} was a sad place, but {theA} did not believe it.",
            "It was quiet there, and everything was covered with dust and leaves.",
        ),
        (
            "{He} came back every day and made it a little more beautiful.",
            '"I will bring you back to life," said {A}, and {he} began to work.',
        ),
        ("Soon {F} came to help, and then {G} came too.", "{Fc} brought flowers, and {G} brought music."),
        ("By the end of summer, {B} was full of laughter.", "In the end everybody wanted to see {B}."),
        ("They had a great feast there with {food} for everybody.", "{Ac} sat down near {B} and was very happy."),
    ),
    (  # the journey to it
        (
            "{Ac} had heard of {a_B} far away, where wishes come true.",
            "An old song told of {a_B} at the end of the world.",
        ),
        (
            "One {weather} morning, {theA} set off to find {B}.",
            '"I will find {B}," said {A}, and {he} set off at once.',
        ),
        (
            "On the way {he} met {a_F} and shared {food} and stories.",
            "The way was long, and more than once {he} wanted to turn back.",
        ),
        ('"Go on," said {F}. "It is not far any more."', 'But every evening {he} told {himself}, "One more day."'),
        ("At last {he} saw {B} in the morning light.", "And then, behind the last hill, there was {B}."),
        (
            "{Ac} made a wish, but {he} never told anybody what it was.",
            "{Ac} understood that the way there had been the real gift.",
        ),
    ),
)

THING_PLOTS: dict[str, tuple[Plot, ...]] = {"object": _OBJECT_PLOTS, "landmark": _LANDMARK_PLOTS}
