"""The kinds of constraints: what they accept, by listing texts, and how the command line writes them."""

import itertools
import re

import pytest

from adlm import AllOf, Characters, Choices, JsonSchema, Regex, Words
from adlm.constraints.byte_automata import DEAD
from adlm.constraints.kinds import NOT_WORD, parse_constraints
from adlm.constraints.patterns import byte_automaton
from adlm.errors import UserError

TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("ab é", repeat=length)]


def accepts(constraint, text):
    automaton, state = byte_automaton(constraint), 0
    for byte in text.encode():
        state = automaton.next[state, byte]
        if state == DEAD:
            return False
    return bool(automaton.final[state])


def accepted(constraint):
    return {text for text in TEXTS if accepts(constraint, text)}


def test_choices_are_literal_texts():
    choices = Choices(["a+b", "x", "x|y"])
    assert [text for text in ("a+b", "aab", "x", "x|y", "y", "") if accepts(choices, text)] == ["a+b", "x", "x|y"]


def occurs(word, text):
    return any(
        not text[max(0, start - 1) : start].isalnum() and not text[start + len(word) : start + len(word) + 1].isalnum()
        for start in range(len(text))
        if text.startswith(word, start)
    )


@pytest.mark.parametrize(
    ("required", "forbidden"), [(["a"], []), ([], ["ab"]), (["a", "b"], []), (["ab"], ["é", "a"]), (["a b"], ["b"])]
)
def test_words_are_whole_words_or_parts_of_them(required, forbidden):
    for whole, contains in ((True, occurs), (False, lambda word, text: word in text)):
        expected = {
            text
            for text in TEXTS
            if all(contains(word, text) for word in required) and not any(contains(word, text) for word in forbidden)
        }
        assert accepted(Words(required, forbidden, whole)) == expected


def test_word_characters_are_those_of_python_but_for_rare_symbols():
    """Among the letters and digits of most alphabets and the usual punctuation, they are what Python's \\w is."""
    characters = [chr(code) for code in (*range(0xAA), *range(0xC0, 0x250), *range(0x3A3, 0x3CA), *range(0x410, 0x482))]
    characters += "“”‘’–—…•€→「」、。日本語한국어ひらがな"
    differ = {each for each in characters if bool(re.match(r"\w", each)) == bool(re.match(NOT_WORD, each))}
    assert differ == set()


def test_characters_are_counted_as_unicode_counts_them():
    assert accepted(Characters(2, 3)) == {text for text in TEXTS if 2 <= len(text) <= 3}
    assert accepted(Characters(4)) == {text for text in TEXTS if len(text) >= 4}
    assert accepts(Characters(1, 1), "😀")
    assert not accepts(Characters(1, 1), "e\u0301")  # two characters: a letter and an accent


def test_all_of_is_the_intersection():
    parts = [Regex("[ab ]*"), Words(["a"]), Characters(0, 4), Choices(["a", "a b", "ab", "b a", "a b b"])]
    assert accepted(AllOf(parts)) == {"a", "a b", "b a"}
    assert accepted(AllOf(parts[:3])) == set.intersection(*map(accepted, parts[:3]))
    assert AllOf([parts[0], AllOf(parts[1:])]) == AllOf(parts)
    assert accepted(AllOf([Regex("a"), Regex("b")])) == set()


def test_constraints_are_values():
    """Equal ones have one automaton, and what is done to a list or dict later changes none."""
    schema, texts = {"type": "integer"}, ["a", "b"]
    for make in (
        lambda: JsonSchema(schema),
        lambda: Choices(texts),
        lambda: Words(texts, ["c"]),
        lambda: AllOf([Choices(texts), JsonSchema(schema)]),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())
        assert byte_automaton(make()) is byte_automaton(make())
    one = JsonSchema(schema)
    schema["type"] = "boolean"
    assert accepts(one, "1")
    assert one != JsonSchema(schema)
    assert JsonSchema({"enum": [1]}) != JsonSchema({"enum": [True]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda texts=texts: Choices(texts), "Choices ") for texts in ("yes", [], [""], [1], None)),
        (lambda: Choices(["x" * 1000] * 1000), "Choices have 1,000,000 characters in all, and at most 200,000"),
        (lambda: Regex(3), "Regex needs a text, not a int"),
        (lambda: JsonSchema("{}"), "JsonSchema needs a dict, not a str"),
        (lambda: JsonSchema({"enum": [{1, 2}]}), "a part that is no JSON: .*set"),
        (lambda: JsonSchema({"const": float("nan")}), "a part that is no JSON"),
        (lambda: JsonSchema({"description": "x" * 1_000_000}), "has 1,000,019 characters, and at most 1,000,000"),
        (lambda: Words(), "Words must have required or forbidden texts"),
        (lambda: Words("the"), "required of Words must be a list of texts, not 'the'"),
        (lambda: Words(["a"], whole=1), "whole of Words must be True or False, not 1"),
        (lambda: Words(["x" * 20_000]), "required of Words have 20,000 characters in all, and at most 10,000"),
        (lambda: Words([*"abcdefghijklmnopq"]), "Words have 17 required texts, and at most 16 are allowed"),
        (
            lambda: AllOf([*map(Regex, "abc" * 9)] + [Characters(0, n + 1) for n in range(30)]),
            "AllOf has 33 constraints",
        ),
        (lambda: Characters(-1, 2), "least of Characters -1 must be 0 or more"),
        (lambda: Characters(5, 2), "least 5 above most 2"),
        (lambda: Characters("5"), "least of Characters must be a whole number, not '5'"),
        (lambda: Characters(0, 0), "most of Characters 0 must be at least 1"),
        (lambda: AllOf([]), "AllOf needs a list of constraints"),
        (lambda: AllOf(["a"]), r"AllOf needs a list of constraints .* not \['a'\]"),
    ],
)
def test_a_wrong_constraint_is_refused_with_its_value(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert len(str(caught.value)) < 250


def test_the_command_line_writes_each_kind(tmp_path):
    file = tmp_path / "choices.json"
    file.write_text('["a", "é"]', encoding="utf-8")
    words = {
        "a=[0-9]{2}:x": Regex("[0-9]{2}:x"),
        "b=regex:json:x": Regex("json:x"),
        'c=choices:["a=b"]': Choices(["a=b"]),
        f"d=choices:@{file}": Choices(["a", "é"]),
        'e=json:{"type": "null"}': JsonSchema({"type": "null"}),
        'f=words:{"required": ["a"], "whole": false}': Words(["a"], whole=False),
        "g=characters:3..10": Characters(3, 10),
        "h=characters:7": Characters(7, 7),
        "i=characters:..9": Characters(0, 9),
        "j=characters:9..": Characters(9),
        "k=": Regex(""),
        "l=horses?:x": Regex("horses?:x"),
        "m=horse: [a-z]": Regex("horse: [a-z]"),
        "n=regex:choice:x": Regex("choice:x"),
        "o=choice": Regex("choice"),
    }
    assert [*parse_constraints([*words], "--constrain").values()] == [*words.values()]
    assert [*parse_constraints([*words], "--constrain")] == [*"abcdefghijklmno"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("x", "'x' is no constraint; give NAME=PATTERN"),
        ("=x", "'=x' is no constraint"),
        ("x=characters:a..b", "is no length; give NAME=characters:3..10"),
        ("x=characters:..", "is no length"),
        ("x=characters:9..3", "least 9 above most 3"),
        ("x=words:[1]", "is no words; give NAME=words:"),
        ('x=words:{"require": []}', "is no words"),
        ("x=choices:yes,no", 'after choices; write NAME=choices:["yes","no"], in quotes for the shell'),
        ('x=choice:["yes","no"]', 'did you mean choices:["yes","no"]? A regular expression that begins with choice:'),
        ("x=char:3..10", "did you mean characters:3..10? A regular expression that begins with char: is"),
        ("x=Words:" + "a" * 100, "did you mean words:"),
        ("x=json:@none.json", "none.json cannot be read: No such file or directory"),
        ("x=json:@.", "is not a regular file"),
        ("x=json:@wrong.json", "has no valid JSON in the file wrong.json; correct it"),
        ("x=json:@large.json", "large.json has 4,000,001 bytes, more than the limit of 4,000,000"),
        ("x=json:" + "[" * 100_000, "has no valid JSON after json"),
        ("x=json:[]", "JsonSchema needs a dict, not a list"),
    ],
    ids=lambda value: value[:25],
)
def test_a_word_that_is_no_constraint_is_refused_in_one_line(word, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.json").write_bytes(b"{\xff")
    (tmp_path / "large.json").write_bytes(b" " * 4_000_001)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        parse_constraints([word], "--constrain")
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)
