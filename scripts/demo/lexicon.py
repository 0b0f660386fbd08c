"""The words the generator composes from. The split depends on the words, not on their order."""

CREATURES = """fox rabbit bear mouse owl cat dog hedgehog squirrel badger otter frog turtle duck goose hen
rooster crow sparrow robin swan penguin seal whale dolphin crab snail bee ant beetle spider
butterfly ladybird cricket wolf deer horse pony donkey goat sheep lamb cow pig hamster mole
bat lion tiger elephant monkey giraffe zebra camel kangaroo koala panda parrot peacock
dragon unicorn giant elf troll ghost robot wizard witch knight king queen prince princess
pirate sailor baker farmer gardener teacher doctor painter cook tailor shepherd fisherman
girl boy grandmother grandfather snowman lizard raccoon beaver moose goblin fairy puppy
kitten""".split()

FEMALE = {"hen", "cow", "queen", "princess", "witch", "girl", "grandmother", "fairy", "ladybird", "bee"}
MALE = {"rooster", "king", "prince", "boy", "grandfather", "snowman", "wizard", "fisherman", "giant"}

OBJECTS = """lantern key map kite drum bell umbrella hat scarf boot blanket pillow mirror clock candle
basket bucket ladder rope wheel boat cart balloon ball doll book letter pencil brush teapot
cup spoon bowl plate pot pie cake cookie apple pear cherry pumpkin carrot mushroom acorn
feather shell pebble stone coin crown ring necklace button needle thread ribbon flag flute
violin trumpet guitar piano chair table lamp box chest bag backpack whistle compass
telescope magnet hammer shovel broom net fence door window chimney bridge tower flower rose
seed leaf tree nest egg star moonstone rainbow cloud snowflake toaster radio camera bicycle
train sled puppet puzzle painting statue treasure potion wand cloak shield sword helmet
saddle jar bottle sandwich pancake honeypot""".split()

PLACES = {
    "forest": "in the forest",
    "meadow": "in a wide meadow",
    "village": "in a quiet village",
    "mountain": "high on a mountain",
    "river": "beside the river",
    "lake": "by a clear lake",
    "beach": "near the beach",
    "island": "on a small island",
    "castle": "in an old castle",
    "garden": "in a green garden",
    "farm": "on a sunny farm",
    "desert": "at the edge of the desert",
    "valley": "in a deep valley",
    "cave": "close to a dark cave",
    "harbour": "beside the harbour",
    "city": "in a busy city",
    "market": "next to the market",
    "school": "near the school",
    "library": "above the library",
    "windmill": "beside a windmill",
    "lighthouse": "by the lighthouse",
    "swamp": "in a misty swamp",
    "jungle": "in the jungle",
    "orchard": "in an old orchard",
    "hill": "on top of a hill",
    "station": "behind the station",
    "bakery": "next to the bakery",
    "mill": "by the old mill",
    "pond": "beside a pond",
    "barn": "in a red barn",
}

NAMES = """Pip Milo Luna Tom Anna Ben Clara Daisy Ella Felix Gus Hazel Ivy Jack Kate Leo Maya Nico
Olive Poppy Quinn Rosa Sam Tilly Uma Vera Will Zoe Bruno Cleo Dora Emil Fern Greta Hugo Iris
Jonas Kira Lily Max Nina Otto Petra Remy Sofia Theo Ursula Victor Wanda Yara Alma Basil Coco
Dexter Edith Finn Gloria Henry Ida Jasper Lena Marco Nora Oscar Paula Ruby Simon Tara
Vincent Willow Arthur Bella Charlie David Emma Frank Grace Hannah Isaac Julia Kevin Laura
Martin Nadia Oliver Peter Rita Sarah Tim Vivian Walter Alice Bob Carol Eve John Mary James
Linda Amir Chen Fatima Hiro Ingrid Jorge Kofi Leila Mei Noah Omar Priya Raj Sven Tomas Yuki""".split()

WOMEN = set(
    """Luna Anna Clara Daisy Ella Hazel Ivy Kate Maya Olive Poppy Rosa Tilly Uma Vera Zoe Cleo Dora Fern Greta
Iris Kira Lily Nina Petra Sofia Ursula Wanda Yara Alma Coco Edith Gloria Ida Lena Nora Paula Ruby Tara Willow
Bella Emma Grace Hannah Julia Laura Nadia Rita Sarah Vivian Alice Carol Eve Mary Linda Fatima Ingrid Leila Mei
Priya
Yuki""".split()
)

CITIES = """Paris London Berlin Rome Madrid Lisbon Vienna Prague Oslo Helsinki Dublin Athens Warsaw
Budapest Tokyo Beijing Delhi Cairo Nairobi Lima Bogota Toronto Boston Chicago Denver Seattle
Miami Sydney Melbourne Auckland Seoul Bangkok Jakarta Manila Dubai Tehran Istanbul Moscow
Kyiv Zurich Geneva Munich Hamburg Milan Naples Porto Lyon Ghent Osaka Kyoto Mumbai Lagos
Accra Havana Quito Santiago Brasilia Montreal Vancouver Dallas""".split()

JOBS = """teacher doctor nurse baker farmer pilot cook painter writer singer engineer lawyer driver
gardener carpenter plumber dentist tailor waiter librarian scientist actor builder mechanic""".split()

COLOURS = "red blue green yellow orange purple pink brown black white grey golden silver".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

MONTHS = """January February March April May June July August September October November December""".split()

TRAITS = """small brave curious kind shy clever gentle cheerful quiet lonely sleepy playful patient
proud stubborn careful hungry young old friendly""".split()

LOOKS = """old shiny tiny wooden golden red blue green yellow silver broken heavy dusty lovely strange
round little beautiful colourful plain magic""".split()

WORDS = """apple river house green stone table music water light paper cloud sugar tiger lemon bread
chair plant train ocean smile dream night sun moon star fish bird tree cup book road hill
door lamp wind rain snow fire salt milk sand rock leaf wolf lion king ring song game ball
boat ship coat shoe hand foot head nose cat dog cow pig hen ant bee zebra yellow orange
purple garden window summer winter spring autumn morning evening silver golden castle dragon
forest island mirror pencil rocket ticket wallet bottle button candle carpet copper cotton
dinner doctor engine farmer finger flower ginger hammer honey jacket kettle ladder magnet
market needle number office pepper pocket potato rabbit school shadow spider street tomato
turtle valley violin""".split()
