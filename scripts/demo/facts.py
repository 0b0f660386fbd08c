"""Simple facts with several wordings each, and questions that follow them up."""

from scripts.demo.lexicon import DAYS, MONTHS
from scripts.demo.source import Dialogue, Source, assistant, user

CAPITALS = """France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna,
Poland Warsaw, Greece Athens, Ireland Dublin, Norway Oslo, Sweden Stockholm, Finland
Helsinki, Denmark Copenhagen, Belgium Brussels, Hungary Budapest, Egypt Cairo, Kenya
Nairobi, Japan Tokyo, China Beijing, India Delhi, Russia Moscow, Canada Ottawa, Peru Lima,
Cuba Havana, England London, Scotland Edinburgh, Thailand Bangkok, Vietnam Hanoi, Turkey
Ankara, Australia Canberra, Brazil Brasilia, Chile Santiago, Switzerland Bern, Ukraine Kyiv"""
SOUNDS = """dog woof, cat meow, cow moo, sheep baa, pig oink, duck quack, rooster cock-a-doodle-doo,
horse neigh, lion roar, frog ribbit, bee buzz, owl hoot, mouse squeak, snake hiss, wolf
howl, donkey hee-haw, hen cluck, bird tweet"""
YOUNG = """dog puppy, cat kitten, cow calf, sheep lamb, pig piglet, duck duckling, hen chick, horse
foal, goat kid, bear cub, lion cub, frog tadpole, goose gosling, deer fawn, kangaroo joey,
swan cygnet"""
COLOURS = """grass green, snow white, the sky blue, blood red, the sun yellow, coal black, milk white, a
banana yellow, a lemon yellow, a carrot orange, chocolate brown, an elephant grey, a tomato
red, a flamingo pink, a leaf green, a frog green, a strawberry red, the night black"""
OPPOSITES = """hot cold, big small, up down, left right, day night, black white, good bad, fast slow, old
young, wet dry, happy sad, open closed, light dark, full empty, loud quiet, hard soft, rich
poor, high low, near far, early late, long short, strong weak, sweet sour, clean dirty, true
false, inside outside, start end, win lose, buy sell"""
LEGS = """a dog four, a cat four, a spider eight, an ant six, a bird two, a bee six, a horse four, a snake no,
a crab ten"""
PLURALS = """mouse mice, child children, foot feet, tooth teeth, man men, woman women, goose geese, fox
foxes, leaf leaves, box boxes, wolf wolves, city cities, knife knives, fish fish, sheep
sheep"""
HOMES = """a bee hive, a bird nest, a spider web, a fox den, a dog kennel, a horse stable, a pig sty, a
king castle, a rabbit burrow"""
COUNTS = """days week 7, hours day 24, minutes hour 60, seconds minute 60, months year 12, days year
365, letters alphabet 26, wheels bicycle 2, wheels car 4, planets solar-system 8, sides
triangle 3, sides square 4, seasons year 4, fingers hand 5, toes foot 5, eggs dozen 12,
colours rainbow 7, players football-team 11, legs chair 4"""
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
ODD_FACTS = (
    (
        ("What is the largest planet?", "Which planet is the biggest?", "Name the biggest planet."),
        "Jupiter is the largest planet.",
    ),
    (
        (
            "Which planet is closest to the sun?",
            "What is the first planet from the sun?",
            "Name the planet nearest the sun.",
        ),
        "Mercury is closest to the sun.",
    ),
    (
        ("Which planet is red?", "What is the red planet called?", "Name the red planet."),
        "Mars is the red planet.",
    ),
    (
        ("On which planet do we live?", "What is our planet called?", "What planet are we on?"),
        "We live on the Earth.",
    ),
    (
        ("What is frozen water called?", "What does water become when it freezes?", "What is frozen water?"),
        "Frozen water is called ice.",
    ),
    (
        ("At what temperature does water boil?", "When does water boil?", "How hot is boiling water?"),
        "Water boils at 100 degrees Celsius.",
    ),
    (
        ("At what temperature does water freeze?", "When does water freeze?", "How cold is freezing water?"),
        "Water freezes at 0 degrees Celsius.",
    ),
    (("What do bees make?", "What do we get from bees?", "Which food comes from bees?"), "Bees make honey."),
    (
        ("What do cows give us?", "Where does milk come from?", "Which animal gives milk?"),
        "Cows give us milk.",
    ),
    (
        ("What is the largest animal?", "Which animal is the biggest?", "Name the biggest animal."),
        "The blue whale is the largest animal.",
    ),
    (
        ("Which animal has a trunk?", "What animal has a long trunk?", "Who has a trunk?"),
        "The elephant has a trunk.",
    ),
    (
        ("What is the tallest animal?", "Which animal has the longest neck?", "Who has a very long neck?"),
        "The giraffe is the tallest animal.",
    ),
    (
        ("What shines at night?", "What do we see in the sky at night?", "What is in the night sky?"),
        "The moon and the stars shine at night.",
    ),
    (
        (
            "Where does the sun rise?",
            "In which direction does the sun come up?",
            "Where does the sun come up?",
        ),
        "The sun rises in the east.",
    ),
    (
        (
            "Where does the sun set?",
            "In which direction does the sun go down?",
            "Where does the sun go down?",
        ),
        "The sun sets in the west.",
    ),
    (
        ("What do plants need?", "What does a plant need to grow?", "What makes plants grow?"),
        "Plants need water, light and air.",
    ),
    (
        ("What is the longest river?", "Which river is the longest?", "Name the longest river."),
        "The Nile is the longest river.",
    ),
    (
        ("What is the highest mountain?", "Which mountain is the highest?", "Name the highest mountain."),
        "Mount Everest is the highest mountain.",
    ),
    (
        ("What is the biggest ocean?", "Which ocean is the largest?", "Name the largest ocean."),
        "The Pacific is the largest ocean.",
    ),
    (
        ("What is the first letter of the alphabet?", "Which letter comes first?", "Name the first letter."),
        "A is the first letter.",
    ),
    (
        ("What is the last letter of the alphabet?", "Which letter comes last?", "Name the last letter."),
        "Z is the last letter.",
    ),
)
AFTER = (
    "Which {kind} comes after {a}?",
    "What {kind} is after {a}?",
    "What comes after {a}?",
    "Name the {kind} after {a}.",
    "What is the {kind} that follows {a}?",
    "Which {kind} follows {a}?",
)
BEFORE = (
    "Which {kind} comes before {a}?",
    "What {kind} is before {a}?",
    "What comes before {a}?",
    "Name the {kind} before {a}.",
    "Which {kind} is just before {a}?",
)
KINDS = {
    "capital": (
        CAPITALS,
        "The capital of {a} is {b}.",
        (
            "What is the capital of {a}?",
            "What's the capital of {a}?",
            "Which city is the capital of {a}?",
            "Name the capital of {a}.",
            "Tell me the capital of {a}.",
            "{a}: what is its capital?",
            "Capital of {a}?",
            "Do you know the capital of {a}?",
            "What is {a}'s capital?",
            "Which city is {a}'s capital?",
        ),
        "And of {a}?",
    ),
    "sound": (
        SOUNDS,
        "A {a} says {b}.",
        (
            "What does a {a} say?",
            "What sound does a {a} make?",
            "Which sound does a {a} make?",
            "How does a {a} sound?",
            "What noise does the {a} make?",
            "Tell me the sound of a {a}.",
            "What does the {a} say?",
        ),
        "And a {a}?",
    ),
    "young": (
        YOUNG,
        "A young {a} is called a {b}.",
        (
            "What is a young {a} called?",
            "What is a baby {a} called?",
            "How do you call a young {a}?",
            "What do we call the baby of a {a}?",
            "Name the young of a {a}.",
            "What's the word for a baby {a}?",
        ),
        "And a young {a}?",
    ),
    "colour": (
        COLOURS,
        "The colour of {a} is {b}.",
        (
            "What colour is {a}?",
            "Which colour is {a}?",
            "What is the colour of {a}?",
            "What color is {a}?",
            "Tell me the colour of {a}.",
            "Which colour does {a} have?",
        ),
        "And {a}?",
    ),
    "opposite": (
        OPPOSITES,
        "The opposite of {a} is {b}.",
        (
            "What is the opposite of {a}?",
            "What's the opposite of {a}?",
            "Tell me the opposite of {a}.",
            "Opposite of {a}?",
            "Which word is the opposite of {a}?",
            "Give me the opposite of {a}.",
            "Which word means the contrary of {a}?",
        ),
        "And of {a}?",
    ),
    "legs": (
        LEGS,
        "{A} has {b} legs.",
        (
            "How many legs does {a} have?",
            "How many legs has {a}?",
            "What is the number of legs of {a}?",
            "Count the legs of {a}.",
            "Tell me how many legs {a} has.",
        ),
        "And {a}?",
    ),
    "plural": (
        PLURALS,
        "The plural of {a} is {b}.",
        (
            "What is the plural of {a}?",
            "Tell me the plural of {a}.",
            "Plural of {a}?",
            "One {a}, two what?",
            "How do you write more than one {a}?",
            "What's the plural of {a}?",
        ),
        "And of {a}?",
    ),
    "home": (
        HOMES,
        "The home of {a} is called a {b}.",
        (
            "Where does {a} live?",
            "What is the home of {a} called?",
            "In what does {a} live?",
            "Name the home of {a}.",
            "What do we call the home of {a}?",
        ),
        "And {a}?",
    ),
}
COUNT_QUESTIONS = (
    "How many {a} does a {c} have?",
    "How many {a} are in a {c}?",
    "How many {a} are there in a {c}?",
    "What is the number of {a} in a {c}?",
    "Tell me how many {a} a {c} has.",
    "{A} in a {c}?",
)


def table_pair(source: Source, table: str) -> tuple[str, str]:
    """One entry of a table: (what is asked, the answer)."""
    *asked, answer = source.choice(table.replace("\n", " ").split(",")).split()
    return " ".join(asked), answer


def table_fact(source: Source) -> Dialogue:
    """A question from one of the tables, sometimes followed by "And of ...?"."""
    table, answer, questions, follow_up = KINDS[source.choice(tuple(KINDS))]
    messages, said = [], ""
    for turn in range(1 + source.chance(0.2)):
        a, b = table_pair(source, table)
        asked = follow_up if turn else source.wording(questions)
        said = answer.format(a=a, b=b, A=a[0].upper() + a[1:])
        messages += [user(source.typed(asked.format(a=a))), assistant(said)]
    return Dialogue(messages, "fact", expect={"exact": said})


def count_fact(source: Source) -> Dialogue:
    """How many of one thing a whole has."""
    what, whole, count = source.choice(COUNTS.replace("\n", " ").split(",")).split()
    whole = whole.replace("-", " ")
    asked = source.wording(COUNT_QUESTIONS).format(a=what, c=whole, A=what.capitalize())
    article = "An" if whole[0] in "aeiou" or whole == "hour" else "A"
    said = f"{article} {whole} has {count} {what}."
    return Dialogue([user(source.typed(asked)), assistant(said)], "fact", expect={"exact": said})


def order_fact(source: Source) -> Dialogue:
    """The neighbour of a day, a month, a planet, a letter or a number."""
    numbers, letters = [str(n) for n in range(1, 31)], list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    kind, row = source.choice(
        (("day", DAYS), ("month", MONTHS), ("planet", PLANETS), ("letter", letters), ("number", numbers))
    )
    where = source.number(0, len(row) - 2)
    first, second = row[where], row[where + 1]
    if source.chance(0.6):
        asked, said = source.wording(AFTER).format(kind=kind, a=first), f"After {first} comes {second}."
    else:
        asked, said = source.wording(BEFORE).format(kind=kind, a=second), f"Before {second} comes {first}."
    return Dialogue([user(source.typed(asked)), assistant(said)], "fact", expect={"exact": said})


def odd_fact(source: Source) -> Dialogue:
    questions, said = source.choice(ODD_FACTS)
    return Dialogue(
        [user(source.typed(source.wording(questions))), assistant(said)], "fact", expect={"exact": said}
    )


def fact(source: Source) -> Dialogue:
    draw = source.random.random()
    if draw < 0.6:
        return table_fact(source)
    return (count_fact if draw < 0.7 else order_fact if draw < 0.85 else odd_fact)(source)
