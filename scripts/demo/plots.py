"""Plot skeletons of the little stories.

A plot is a list of beats, a beat a list of sentences that can stand for each other. Marks in a
sentence: {name} {he} {him} {his} the hero; {hero} its kind ("fox"); {a_hero} "a small fox"; {friend} {fhe}
{fhim} {fhis} the friend's name and pronouns; {fkind} its kind; {a_friend} "a kind owl"; {thing} "lantern";
{a_thing} "an old lantern"; {place} "forest"; {at} "in the forest". A capital first letter (`{He}`) starts a
sentence.
Every plot must use {thing} and {a_friend} or {friend}; the opening names the hero and the place.
"""

OPENINGS = (
    "Once upon a time there was {a_hero} named {name} who lived {at}.",
    "There once was {a_hero} called {name}. {He} lived {at}.",
    "{At} lived {a_hero} named {name}.",
    "Long ago, {at}, there lived {a_hero} called {name}.",
    "{name} was {a_hero} who lived {at}.",
    "One fine day {a_hero} named {name} woke up {at}.",
)

PLOTS = {
    "lost_and_found": [
        [
            "{name} loved {his} {thing} more than anything.",
            "{His} dearest treasure was {a_thing}.",
            "Every day {he} played with {a_thing}.",
        ],
        [
            "One morning the {thing} was gone.",
            "One evening {he} could not find the {thing}.",
            "But one windy day the {thing} disappeared.",
        ],
        [
            "{name} looked under the bed, behind the door and in the tall grass, but found nothing.",
            "{He} searched the whole {place} until {his} feet were sore.",
            "{He} looked everywhere and began to cry.",
        ],
        [
            'Then {a_friend} named {friend} came by. "Do not cry," said {friend}. "We will look together."',
            '{friend}, {a_friend}, heard {him}. "Let me help you," said {friend}.',
        ],
        [
            "They followed a trail of little footprints to an old tree, and there lay the {thing}.",
            "{friend} looked up, and there it was: the {thing} was hanging in a tree.",
            "At last {friend} saw something under a bush. It was the {thing}!",
        ],
        ["{name} hugged {friend} and laughed.", "{name} danced with joy and thanked {friend}."],
        [
            "From that day on they played with the {thing} together.",
            "And {name} learned that a good friend is the best thing to find.",
        ],
    ],
    "broken": [
        ["{He} had {a_thing} that {he} used every day.", "On {his} birthday {he} got {a_thing}."],
        [
            "One day {name} fell over a root, and the {thing} broke in two.",
            "But {he} was not careful, and the {thing} fell down and broke.",
            "One stormy night the {thing} fell from the shelf and broke.",
        ],
        ['"Oh no!" cried {name}. "What shall I do now?"', "{name} sat down and felt very sad."],
        [
            "{friend}, {a_friend}, knew how to mend things.",
            "Next door lived {a_friend} named {friend} who could repair anything.",
        ],
        [
            '"Bring me some string and a little glue," said {friend}, and {name} ran to get them.',
            '"If you help me, we can mend it," said {friend}.',
        ],
        [
            "They worked all afternoon until the {thing} was whole again.",
            "They worked side by side, and by evening the {thing} looked like new.",
        ],
        [
            '"It is even better than before," said {name}, "because we made it together."',
            "{name} was so happy that {he} baked a cake for {friend}.",
            "After that {name} always took good care of the {thing}.",
        ],
    ],
    "dark_night": [
        ["{name} was afraid of the dark.", "When the sun went down, {name} always hid under a blanket."],
        [
            "One night {he} heard a strange noise outside.",
            'One night a soft voice called from far away: "Help!"',
        ],
        [
            "{He} took {his} {thing}, breathed in deeply and went out.",
            "{name} held {his} {thing} tight and opened the door.",
        ],
        [
            "Behind a big stone sat {a_friend} named {friend}, who had lost the way home.",
            "There, all alone, was {friend}, {a_friend}, who was lost.",
        ],
        [
            '"Please do not be afraid," said {name}. "I have {a_thing}, and I know the way."',
            '"Come with me," said {name}. "My {thing} will help us."',
        ],
        [
            "Together they walked through the dark until they saw the house of {friend}.",
            "They walked hand in hand and sang until they saw a light in a window.",
        ],
        [
            "When {name} came home, {he} noticed something: {he} was not afraid any more.",
            "Since that night {name} has not been afraid of the dark.",
        ],
    ],
    "sharing": [
        [
            "One day {name} found {a_thing} and wanted to keep it for {himself}.",
            "{name} had {a_thing} and never let anyone touch it.",
        ],
        [
            '"May I see it?" asked {friend}, {a_friend}. "No," said {name}. "It is mine!"',
            'Then came {a_friend} named {friend}. "Can we play with it together?" "No!" said {name}.',
        ],
        [
            "{friend} went away sadly, and {name} sat alone with the {thing}.",
            "So {friend} left, and it became very quiet around {name}.",
        ],
        ["But it was no fun to be alone.", "Soon {name} felt bored and lonely."],
        [
            "{He} picked up the {thing} and ran after {friend}.",
            "The next morning {he} carried the {thing} to the house of {friend}.",
        ],
        [
            '"I am sorry," said {name}. "Let us share the {thing}."',
            '"Please forgive me," said {name}. "The {thing} belongs to both of us now."',
        ],
        [
            "{friend} smiled, and they played until the stars came out.",
            "They laughed all day, and {name} learned that sharing makes everything better.",
        ],
    ],
    "race": [
        [
            "One day there was a big race, and the prize was {a_thing}.",
            "Every summer there was a race, and this year the winner would get {a_thing}.",
        ],
        [
            "{name} wanted to win the {thing} so much that {he} trained every morning.",
            '"I am going to win the {thing}!" said {name}.',
        ],
        [
            "{friend}, {a_friend}, wanted to run too.",
            "Next to {him} at the start stood {friend}, {a_friend}.",
        ],
        [
            '"Ready, steady, go!" They ran as fast as they could.',
            "The bell rang, and off they went, over the stones and through the mud.",
        ],
        [
            "Near the end {friend} slipped and fell. {name} stopped and looked back.",
            "Just before the finish {name} heard a cry: {friend} had fallen.",
        ],
        [
            "{He} turned round and helped {friend} up, and they crossed the line together.",
            "{name} did not run on. {He} took {friend} by the hand, and they finished side by side.",
        ],
        [
            "Everybody cheered, and the two friends shared the {thing}.",
            "They were the last of all, but they got the {thing} for being so kind.",
        ],
    ],
    "secret_door": [
        [
            "One day {he} found a small door that {he} had never seen before.",
            "Behind some bushes {name} discovered a tiny door.",
        ],
        ["It was locked, but on a nail beside it hung {a_thing}.", "In front of the door lay {a_thing}."],
        [
            "When {name} touched the {thing}, the door opened with a creak.",
            "{name} knocked with the {thing}, once, twice, three times, and the door swung open.",
        ],
        [
            "Inside sat {a_friend} named {friend} at a little table.",
            "Behind it lived {friend}, {a_friend}, who had waited a long time for a visitor.",
        ],
        [
            '"Come in!" said {friend}. "Nobody has visited me for a hundred years."',
            '"You found my {thing}!" said {friend}. "Would you like some tea?"',
        ],
        [
            "They drank tea, told each other stories and forgot the time.",
            "They ate honey bread and played games until the moon was high.",
        ],
        [
            "Now {name} visits {friend} every week, and the {thing} hangs beside the door.",
            "And whenever {name} holds the {thing}, the little door opens again.",
        ],
    ],
    "gift": [
        [
            "Tomorrow was the birthday of {friend}, {a_friend}, and {name} had no present.",
            "{name} wanted to give {his} friend {friend}, {a_friend}, something special.",
        ],
        ["{He} had only one thing: {a_thing}.", "All {he} owned was {a_thing}, and {he} liked it very much."],
        [
            '"Shall I give it away?" {he} wondered all night.',
            "It was hard to let it go, and {he} thought for a long time.",
        ],
        [
            "In the morning {name} wrapped the {thing} in leaves and tied a bow around it.",
            "At last {he} polished the {thing} until it shone and put it in a box.",
        ],
        [
            "When {friend} opened the present, {fhis} eyes grew wide.",
            '"Is the {thing} really for me?" asked {friend}.',
        ],
        [
            '"This is the best gift I have ever had!" said {friend}.',
            "{friend} was so glad that {fhe} could not speak.",
        ],
        [
            "{name} felt warm inside, because giving had made {him} happy too.",
            "And {name} did not miss the {thing} at all, for {he} could see how happy {friend} was.",
        ],
    ],
    "flood": [
        [
            "One spring it rained for seven days, and the water rose higher and higher.",
            "One night a great storm came, and water ran into every house.",
        ],
        ["{name} climbed onto the roof with {his} {thing}.", "{name} saved only one thing: {his} {thing}."],
        [
            "Then {he} saw {friend}, {a_friend}, who was holding on to a branch.",
            '"Help!" cried {a_friend} named {friend} from a little rock in the water.',
        ],
        [
            '"Hold on!" shouted {name}, and {he} reached out with the {thing}.',
            "{name} tied a rope to the {thing} and threw it as far as {he} could.",
        ],
        [
            "{friend} grabbed it, and {name} pulled with all {his} strength.",
            "{friend} caught it and climbed to safety.",
        ],
        ["Together they waited until the sun came back.", "They sat close together until the rain stopped."],
        [
            (
                "When the water was gone, they built a new house for two, and the {thing} got "
                "the best place in it."
            ),
            "Since then the two have been best friends, and everybody knows the story of the {thing}.",
        ],
    ],
    "music": [
        [
            "{name} dreamed of making music, but {he} had no instrument.",
            "{name} loved songs, but everyone said that {he} sang too loudly.",
        ],
        [
            "One day {he} found {a_thing} and tapped on it. It made a lovely sound.",
            "One day {he} dropped {a_thing}, and it made a wonderful sound.",
        ],
        [
            "From then on {he} played on the {thing} every evening.",
            "So {name} practised with the {thing} day after day.",
        ],
        [
            "{friend}, {a_friend}, heard it and began to dance.",
            "{a_friend} named {friend} stopped to listen and sang along.",
        ],
        ['"Let us give a concert!" said {friend}.', '"You should play for everyone," said {friend}.'],
        [
            "On Sunday they all came, and {name} was so nervous that {his} knees shook.",
            "The day came, and the whole {place} was full of guests.",
        ],
        [
            "But as soon as {he} touched the {thing}, the fear was gone, and everybody clapped.",
            "{name} played the {thing}, {friend} sang, and nobody wanted to go home.",
        ],
    ],
    "cold_winter": [
        [
            "It was a cold winter, and snow covered everything.",
            "That winter was so cold that even the wind was freezing.",
        ],
        ["{name} had a warm room, some soup and {a_thing}.", "{name} sat by the fire with {his} {thing}."],
        [
            "There was a knock at the door. Outside stood {a_friend} named {friend}, shaking with cold.",
            'Late at night {friend}, {a_friend}, knocked at the window. "I am so cold," said {friend}.',
        ],
        [
            '"Come in quickly," said {name}, and {he} gave {friend} a bowl of soup.',
            "{name} opened the door and made room beside the fire.",
        ],
        [
            "{friend} had never seen {a_thing} before and asked about it, so {name} told {fhim} its story.",
            "They sat together, and {name} showed {friend} the {thing}.",
        ],
        [
            "They talked until morning, and the night did not feel cold any more.",
            "Outside the storm howled, but inside they laughed.",
        ],
        [
            "In spring {friend} came back with flowers and put them next to the {thing}.",
            "When spring came, {friend} did not leave, and they lived together happily.",
        ],
    ],
    "wish": [
        [
            "One day {he} found {a_thing} in the grass and rubbed the dirt away.",
            "While walking, {name} stumbled over {a_thing}.",
        ],
        [
            '"You may make one wish," whispered the {thing}.',
            'Suddenly the {thing} began to glow. "Make a wish," it said.',
        ],
        [
            "{name} thought of gold, of cakes and of a big house.",
            "{name} could wish for anything in the world.",
        ],
        [
            "Then {he} saw {friend}, {a_friend}, who sat there with a hurt leg.",
            "But just then {a_friend} named {friend} came along, sad and hungry.",
        ],
        [
            '"I wish that {friend} will be well again," said {name}.',
            '"I wish that {friend} will be happy," said {name} without waiting.',
        ],
        [
            "There was a flash, and {friend} jumped up and laughed.",
            "The {thing} sparkled, and at once {friend} smiled.",
        ],
        [
            "The {thing} never spoke again, but {name} had won a friend.",
            "{name} had no gold, but {he} had {friend}, and that was worth much more.",
        ],
    ],
    "inventor": [
        ["{name} loved to build machines out of old things.", "{name} was always inventing something."],
        [
            "This time {he} needed {a_thing} for a flying machine.",
            "One day {he} took {a_thing} and wanted to make it fly.",
        ],
        [
            '"That will never work," said {friend}, {a_friend}.',
            '{friend}, {a_friend}, shook {fhis} head. "The {thing} cannot fly."',
        ],
        [
            "The first try ended in a bush, and the second in the mud.",
            "It crashed once, it crashed twice, it crashed three times.",
        ],
        [
            "But {name} did not give up. {He} turned the {thing} upside down and tried again.",
            (
                '"I need your help," said {name}. So {friend} held the {thing} while {name} '
                "tightened the screws."
            ),
        ],
        [
            "Slowly, very slowly, the machine rose into the air.",
            "And then it flew, up and up over the {place}!",
        ],
        [
            '"I was wrong," said {friend}. "May I come along?" And they flew into the sunset.',
            "{friend} cheered, and {name} learned never to give up.",
        ],
    ],
    "thief": [
        [
            "One morning there was a great noise: somebody had stolen the {thing}!",
            "Everyone was proud of {a_thing} that stood in the middle of the {place}. One day it was stolen.",
        ],
        ["{name} decided to find the thief.", '"I will bring it back," said {name} bravely.'],
        [
            "{He} followed the muddy footprints for a whole day.",
            "{He} found a trail of crumbs and followed it step by step.",
        ],
        [
            "At the end of the trail sat {a_friend} named {friend} with the {thing}.",
            "The trail led to {friend}, {a_friend}, who was hiding with the {thing}.",
        ],
        [
            '"I only took the {thing} because I was so alone," said {friend} quietly.',
            '"I am sorry," said {friend}. "I just wanted to look at it once."',
        ],
        [
            '{name} was not angry. "Bring it back, and then come and eat with us," {he} said.',
            '"You only had to ask," said {name} and took {fhim} by the hand.',
        ],
        [
            "So the {thing} came home, and {friend} was never alone again.",
            "Together they carried the {thing} back, and everyone forgave {friend}.",
        ],
    ],
    "map_quest": [
        [
            "In an old book {he} found a map with a red cross on it.",
            "One rainy day {name} found a map that showed the way to a treasure.",
        ],
        [
            "{name} packed some bread and {a_thing} and set off.",
            "{He} put {his} {thing} into a bag and started to walk.",
        ],
        [
            'On the way {he} met {a_friend} named {friend}. "May I come with you?" asked {friend}.',
            "Soon {friend}, {a_friend}, joined {him}, for two see more than one.",
        ],
        [
            "They climbed over rocks and crossed a stream.",
            "They walked for three days and slept under the stars.",
        ],
        [
            "At a deep hole they could not go on, but with the {thing} they found a way across.",
            "When they were stuck in the mud, the {thing} helped them out.",
        ],
        [
            (
                'At the red cross they dug and found a chest. In it was a note: "The treasure '
                'is the friend beside you."'
            ),
            "Under the cross there was only a mirror, which showed the two of them smiling.",
        ],
        [
            "They looked at each other and laughed all the way home.",
            '"That is true," said {name}, and they walked home arm in arm.',
        ],
    ],
    "big_and_small": [
        [
            "{name} was too small to reach the {thing} on the high shelf.",
            "High on a wall lay {a_thing}, and {name} was too small to get it.",
        ],
        [
            "{He} jumped, but it was too high. {He} climbed, but {he} slid down again.",
            "{He} stood on a box, but even that was not enough.",
        ],
        [
            "{friend}, {a_friend}, laughed at first, but then {fhe} saw how sad {name} was.",
            "Then {a_friend} named {friend} passed by.",
        ],
        [
            '"Climb on my back," said {friend}.',
            '"I am tall but not quick," said {friend}. "Together we can do it."',
        ],
        [
            "{name} climbed up, stretched out and caught the {thing}.",
            "With one jump {name} reached the {thing} and held it tight.",
        ],
        [
            "But now {friend} was stuck under the shelf, and it was {name} who could help.",
            "On the way down {friend} lost a ring in a tiny crack, and only {name} could reach it.",
        ],
        [
            "So they both learned that big and small need each other.",
            '"Thank you," they said at the same moment, and both of them laughed.',
        ],
    ],
    "garden": [
        [
            "{name} planted a seed and watered it every day.",
            "In spring {name} put a tiny seed into the ground.",
        ],
        ["Nothing grew, and {he} became impatient.", "Days went by, and nothing happened."],
        [
            '{friend}, {a_friend}, came by with {a_thing}. "Put this next to it and wait," said {friend}.',
            '"Take my {thing}," said {a_friend} named {friend}. "It will help the seed."',
        ],
        [
            "{name} did not understand, but {he} placed the {thing} beside the seed.",
            "So {name} used the {thing} with care, day after day.",
        ],
        [
            "It rained, the sun shone, and one morning there was a small green leaf.",
            "After a week a green tip came out of the ground.",
        ],
        [
            "By summer it was a tall plant with a hundred flowers.",
            "Soon a great flower stood there and smelled of honey.",
        ],
        [
            '"Good things take time," said {friend}, and {name} gave the {thing} back with a smile.',
            "{name} gave the first flower to {friend} to say thank you for the {thing}.",
        ],
    ],
    "boast": [
        [
            "{name} told everyone that {he} had the finest {thing} in the world.",
            "{name} was very proud of {his} {thing} and talked of nothing else.",
        ],
        [
            '"Nobody has {a_thing} like mine!" {he} said again and again.',
            '"Look at it! Nobody has such a thing," {he} boasted.',
        ],
        [
            "Soon nobody wanted to listen, except {friend}, {a_friend}.",
            "Only {friend}, {a_friend}, stayed and listened politely.",
        ],
        [
            "One day {name} tripped and fell into a ditch, and the {thing} rolled away.",
            "Then a gust of wind carried the {thing} away.",
        ],
        [
            "{friend} ran after it and brought it back without a word.",
            "{friend} climbed down, got it and cleaned it.",
        ],
        [
            '{name} turned red. "You are a real friend," {he} said. "I have talked too much."',
            '"Why do you help me?" asked {name}. "Because you are my friend," said {friend}.',
        ],
        [
            "From then on {name} spoke less about the {thing} and more about {friend}.",
            "Since then {name} has lent the {thing} to anyone who asks.",
        ],
    ],
    "moon": [
        [
            "{name} wanted to visit the moon.",
            "Every night {name} looked at the moon and wondered what it was made of.",
        ],
        [
            "{He} built a rocket out of boxes and took {his} {thing} along.",
            "One night the moon sent down a silver ladder, and {name} climbed up with {a_thing}.",
        ],
        [
            "Up there it was quiet, and the ground was soft like flour.",
            "On the moon everything was silver, and {he} could jump as high as a house.",
        ],
        [
            "There {he} met {friend}, {a_friend}, who took care of the stars.",
            '"Welcome!" called {a_friend} named {friend}. "I polish the stars here."',
        ],
        [
            "One star had gone out, and {friend} did not know what to do.",
            '"The smallest star is broken," said {friend} sadly.',
        ],
        [
            "{name} held up the {thing}, and the star began to shine again.",
            '"Take my {thing}," said {name}, and with it they mended the star.',
        ],
        [
            "When {name} looks up at night, one little star winks at {him}.",
            "{name} went home before breakfast, and ever since the smallest star has been the brightest.",
        ],
    ],
    "market": [
        [
            "On market day {name} went to sell {a_thing}.",
            "{name} needed money, so {he} took {his} {thing} to the market.",
        ],
        [
            "The first buyer offered a cabbage, and the second an old shoe.",
            "All morning people walked past and nobody stopped.",
        ],
        [
            "Then {friend}, {a_friend}, stood there and looked at the {thing} with big eyes.",
            "At noon came {a_friend} named {friend}, who had no money at all.",
        ],
        [
            '"I have no coins," said {friend}, "but I can teach you a song."',
            '"I can only pay with a story," said {friend}.',
        ],
        ["{name} thought about it and nodded.", '"That is fair," said {name}.'],
        [
            "It was so good that everyone came to listen, and soon {his} hat was full of coins.",
            "People gathered around, laughed and threw coins.",
        ],
        [
            "{name} and {friend} shared the money, and {friend} took the {thing} home.",
            "So {name} got money, {friend} got the {thing}, and both got a friend.",
        ],
    ],
    "storm_at_sea": [
        [
            "One day {name} sailed out in a small boat with {a_thing} on board.",
            "{name} built a raft, loaded {his} {thing} and sailed away.",
        ],
        [
            "Suddenly dark clouds came, and the waves were as high as houses.",
            "In the afternoon the wind grew wild and broke the mast.",
        ],
        [
            '"Help!" called {name}, but there was only water all around.',
            "The boat filled with water, and {name} was afraid.",
        ],
        [
            'Out of the waves came {friend}, {a_friend}. "Hold on to me!"',
            "Then {he} heard a voice. It was {a_friend} named {friend} in a little boat.",
        ],
        [
            "{name} used the {thing} to scoop out the water while {friend} steered.",
            "They fixed the {thing} to the boat, and it kept them steady.",
        ],
        ["At dawn the sea was calm, and they saw the land.", "After a long night they reached the shore."],
        [
            '"You and the {thing} saved us," said {friend}, and they ate breakfast in the sun.',
            "{name} promised never to sail alone again, and {friend} promised to come along.",
        ],
    ],
    "new_neighbour": [
        [
            "One day somebody new moved into the empty house: {friend}, {a_friend}.",
            "Next door moved in {a_friend} named {friend}.",
        ],
        ["{name} was too shy to say hello.", "{name} watched from the window and did not know what to say."],
        [
            "Then {he} had an idea: {he} would bring {a_thing} as a welcome.",
            '"I could lend {fhim} my {thing}," {he} thought.',
        ],
        [
            "With a beating heart {he} knocked at the door.",
            "{He} went over, turned back twice and finally knocked.",
        ],
        [
            '"How nice!" said {friend}. "I have been looking for {a_thing} all day."',
            "{friend} opened, saw the {thing} and smiled from ear to ear.",
        ],
        [
            "They unpacked boxes, drank juice and talked until evening.",
            "Soon they were sitting on the floor and laughing.",
        ],
        [
            '"I was shy too," said {friend}. And the {thing} stood on the table between them.',
            "Since then there has been a path between the two houses, and the {thing} goes back and forth.",
        ],
    ],
    "riddle": [
        [
            "At a bridge stood {friend}, {a_friend}, and let nobody pass.",
            "The road was blocked by {a_friend} named {friend}.",
        ],
        [
            '"Solve my riddle," said {friend}, "and I will give you {a_thing}."',
            '"Only those who answer my riddle may have the {thing}," said {friend}.',
        ],
        ['"What gets bigger the more you share it?"', '"What can you give away and still keep?"'],
        [
            "{name} thought for an hour, then for another.",
            "{name} sat down and thought until {his} head hurt.",
        ],
        ['Then {he} smiled. "Friendship!" {he} said.', '"I know it: love!" {he} called at last.'],
        [
            '{friend} bowed and handed over the {thing}. "You are the first who knew."',
            '"Correct," said {friend}, and the {thing} was {name}\'s.',
        ],
        [
            '"Then let us share it," said {name}, and so the two became friends.',
            (
                "But {name} did not go on alone: {he} invited {friend} for supper, and they "
                "used the {thing} together."
            ),
        ],
    ],
    "sleepless": [
        ["One night {name} could not sleep.", "{name} lay awake and counted sheep, but it did not help."],
        [
            "{He} turned left, {he} turned right, and {he} looked at {his} {thing}.",
            "{He} got up, took {his} {thing} and went for a walk.",
        ],
        [
            "Outside {he} met {friend}, {a_friend}, who could not sleep either.",
            "On a bench sat {a_friend} named {friend} and yawned.",
        ],
        [
            '"What helps you to sleep?" asked {name}. "A story," said {friend}.',
            '"Shall we look at the stars?" asked {friend}.',
        ],
        [
            "So {name} told a long story about the {thing}.",
            "They put the {thing} between them and told each other what they had done that day.",
        ],
        ["Before it ended, {friend} was asleep.", "Soon their voices became slow and soft."],
        [
            "{name} smiled, closed {his} eyes and slept until noon.",
            "In the morning the sun found them both asleep beside the {thing}.",
        ],
    ],
    "mistake": [
        [
            "{friend}, {a_friend}, lent {name} {a_thing} for one day.",
            "{name} had borrowed {a_thing} from {friend}, {a_friend}.",
        ],
        ["{name} was proud and showed it to everyone.", "{He} promised to take good care of it."],
        [
            "But in the evening the {thing} fell into the mud and got a scratch.",
            "But on the way home {he} dropped the {thing}, and it got a dent.",
        ],
        ['"I could say that it was the wind," thought {name}.', "{He} was afraid and wanted to hide it."],
        [
            "But {he} went to {friend} and told the truth.",
            "At last {he} took a deep breath and told {friend} everything.",
        ],
        [
            '"Thank you for being honest," said {friend}. "A {thing} can be mended."',
            '{friend} was quiet for a moment. "I am glad that you told me," {fhe} said.',
        ],
        [
            "They cleaned the {thing} together, and {name} felt as light as a feather.",
            "And because {name} had told the truth, {friend} lent {him} the {thing} again.",
        ],
    ],
}

EXTRAS = (
    [
        "{Name} never went anywhere without {a_extra}.",
        "In {his} pocket {he} always carried {a_extra}.",
        "{Name} also owned {a_extra}, of which {he} was very proud.",
        "On {his} wall hung a picture of {a_extra}.",
    ],
    [
        "And the {extra}? It was given to {friend} as a present.",
        "That evening they also looked at the {extra}.",
        "And {name} let {friend} hold the {extra}.",
        "The {extra} brought them luck ever after.",
    ],
)

MORALS = (
    "The end.",
    "And they lived happily ever after.",
    "So always be kind to each other.",
    "And that is how they became friends.",
    "That night they slept very well.",
    "What a day that was!",
)
