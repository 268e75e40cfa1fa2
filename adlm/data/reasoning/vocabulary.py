"""Names, concepts and properties of generated problems.

The words follow ProntoQA [Saparov and He, 2023] and ProsQA [Hao et al., 2024]: concepts are invented words, so that
problems can be solved only from their sentences.
"""

PRONTOQA_NAMES = ("Alex", "Fae", "Max", "Polly", "Rex", "Sally", "Sam", "Stella", "Wren")
PROSQA_NAMES = (*PRONTOQA_NAMES, "Bob", "Carol", "Davis", "Eva", "Gabriel", "Jack", "Oliver", "Tom")

STEMS = "brim dum gor grim im jom lem lor num rom shum ster tum vum wum yum zum"
MORE_STEMS = "bom boom chor fel fom ger gwom hil jel ker quim rem ror scrom stor ter tim wor yer yim zhor"
PRONTOQA_CONCEPTS = tuple(f"{stem}pus" for stem in STEMS.split())
PROSQA_CONCEPTS = (*PRONTOQA_CONCEPTS, *(f"{stem}pus" for stem in MORE_STEMS.split()))

PROPERTY_FAMILIES = (
    ("blue", "brown", "orange", "red"),
    ("large", "small"),
    ("liquid", "luminous", "metallic", "wooden"),
    ("opaque", "transparent"),
    ("feisty", "happy", "nervous", "shy"),
    ("bright", "dull"),
    ("bitter", "sour", "spicy", "sweet"),
    ("earthy", "floral", "fruity"),
    ("cold", "hot", "temperate"),
    ("aggressive", "amenable", "angry", "kind", "mean"),
    ("discordant", "loud", "melodic", "muffled"),
    ("fast", "moderate", "slow"),
    ("overcast", "rainy", "snowy", "sunny", "windy"),
)
"""A problem uses at most one word of each family, so that properties do not contradict each other."""
