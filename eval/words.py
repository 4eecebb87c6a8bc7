"""Words that prompts are made of, and the wording of facts.

Two lists for names and answers, any number of invented words, and the sentences in which facts are told and asked for.
The small checkpoint was trained on the same sentences about other things (`recipes/small/episodes.py`).
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator

ADJECTIVES = """
able agile alert amber ample ancient aqua arctic ardent autumn azure balmy bare bashful beige big bitter black bland
blank bleak blond blue blunt bold brave brief bright brisk broad bronze brown bulky busy calm candid careful casual
cheap cheery chief chilly civic civil clean clear clever close cloudy coarse cold common cool copper coral cosmic cozy
crafty creamy crimson crisp crude curious curly daily damp dapper dark daring dear decent deep dense dim distant dizzy
double dry dual dull dusty eager early earnest easy elder elegant empty equal exact extra fabled faint fair famous fancy
fast fertile festive few fierce final fine firm first fixed flat fluffy fond formal fragile frail frank free fresh
frosty frozen full funny fuzzy gentle giant gifted glad gleaming global glossy golden good grand grateful gray great
green grim gross happy hardy harsh hasty hazy heavy hidden high hollow honest huge humble hungry husky icy ideal idle
indigo inner ivory jade jolly joyful just keen kind large last late lavish lazy lean light lilac little lively local
lofty lone long loose loud lovely loyal lucky lunar magenta major maroon mellow merry mighty mild minor misty modern
modest moist mossy muddy mute narrow native navy neat new nimble noble noisy normal northern novel odd olive open orange
orderly ornate outer oval pale paper patient perfect pink placid plain pleasant polite proud pure purple quick quiet
rapid rare raw ready red regal rich rigid ripe robust rosy rough round royal rustic
""".split()

NOUNS = """
acorn actor album alley almond anchor angel ankle apple apron arch arrow artist atlas attic badge bagel baker balloon
bamboo banjo banner barn barrel basin basket beach beacon beard beaver bench berry bicycle bishop blanket blossom board
boat bonnet book boot bottle branch bread brick bridge broom brush bucket buffalo bugle bundle butter button cabin cable
cactus camel camera canal candle cannon canoe canyon captain carpet carrot castle cedar cello chain chair chalk cherry
chest chimney church circle clock cloud clover coast cobra coffee comet compass cookie corner cottage cotton cousin
coyote cradle crane crater cricket crown crystal curtain dagger daisy dancer deer desert diamond doctor dolphin donkey
door dragon drum eagle easel elbow engine falcon farmer feather fence ferry fiddle flag flute forest fossil fountain fox
garden garlic gate geyser ginger giraffe glacier glove goblet goose grape guitar hammer harbor hawk hazel helmet heron
hill honey horse hotel igloo island jacket jaguar jewel jungle kettle kitchen kite ladder lagoon lamp lantern lemon
leopard library lion lizard llama lobster lotus magnet mango maple marble meadow melon mirror monkey moon mountain
museum needle nest oasis ocean onion orchard otter owl oyster palace panda parrot peach pebble pelican pencil penguin
piano pigeon pillow pirate planet plum pocket pond poppy potato prince pumpkin puppet pyramid rabbit raven ribbon river
robin rocket rope saddle sailor salmon scarf shadow sheep shell shovel spider spoon squirrel statue stone stove swan
table temple tiger tower trumpet tulip turtle valley violin wagon walnut whale willow window wolf
""".split()

VERBS = """
admires avoids builds carries chases copies crosses draws feeds finds follows guards hears helps holds leads lifts likes
meets needs paints passes pulls reaches remembers sees seeks shows thanks visits watches
""".split()

# Names that no fact in the training of the small checkpoint mentions: recall of these shows what was learned beyond the
# names themselves.
HELD_OUT_NAMES = """
Adrian Bertram Cordelia Dominic Evelyn Fiona Godfrey Hester Imogen Lavinia Leopold Matilda Nigel Ophelia
Percival Rowena
""".split()

# attribute: the ways to tell a fact of it; the suite takes the first one
STATEMENTS = {
    "secret number": [
        "The secret number of {name} is {value}.",
        "The secret number of {name} is {value}.",
        "{name}'s secret number is {value}.",
        "Remember that the secret number of {name} is {value}.",
        "It was well known that the secret number of {name} was {value}.",
    ],
    "secret word": [
        "The secret word of {name} is {value}.",
        "{name}'s secret word is {value}.",
        "Everybody agreed that the secret word of {name} was {value}.",
    ],
    "home city": [
        "The home city of {name} is {value}.",
        "{name}'s home city is {value}.",
        "They said that the home city of {name} was {value}.",
    ],
}
QUESTION = "Question: What is the {attribute} of {name}?\nAnswer:"

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
ASSOCIATIVE_HEAD = "Each line below has a key and its value. Memorize them; keys will be asked for.\n"

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def invented(rng: random.Random) -> str:
    """One of 343,000 words of three syllables that no text contains by accident, such as "bafelu"."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3))


def different(draw: Callable[[], str], seen: Iterable[str] = ()) -> Iterator[str]:
    """Results of `draw()` without end, each of them new: it is not in `seen` and did not come before."""
    seen = set(seen)
    while True:
        if (result := draw()) not in seen:
            seen.add(result)
            yield result


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    """`count` different results of `draw()`, in the order they came."""
    return list(itertools.islice(different(draw), count))
