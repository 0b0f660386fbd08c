"""The words the generator composes from. The split depends on the words, not on their order."""

from scripts.demo.data import lines, words

_WORDS = words("lexicon")
CREATURES, OBJECTS, NAMES, CITIES = (_WORDS[title] for title in ("creatures", "objects", "names", "cities"))
FEMALE, MALE, WOMEN = (set(_WORDS[title]) for title in ("female", "male", "women"))
JOBS, COLOURS, DAYS, MONTHS = (_WORDS[title] for title in ("jobs", "colours", "days", "months"))
TRAITS, LOOKS, WORDS = (_WORDS[title] for title in ("traits", "looks", "words"))
PLACES = dict(line.split(": ") for line in lines("lexicon")["places"])  # place -> where it is
