"""Detokenisers reproduce the released code, on example lines and on real files."""

import hashlib
import json

import pytest

from adlm.data.sources.corpora import DETOKENISERS, wikitext_line

# Made-up lines in the corpora's forms; the right side is what the released code makes of the left.
VECTORS = [
    ("wikitext", " = = Early life = = \n", " == Early life ==\n"),
    (
        "wikitext",
        ' The 1990s \' end @-@ of @-@ year list , as " The Times " put it , cost $ 1 @,@ 200 ( about 3 @.@ 5 % ) .\n',
        ' The 1990s\' end-of-year list, as "The Times" put it, cost $ 1,200 (about 3.5 %) .\n',
    ),
    (
        "wikitext",
        " It was 25 ° C at sea ; the ship 's crew ( N men ) sang : ' Ahoy ' !\n",
        " It was 25°C at sea; the ship's crew (N men) sang:' Ahoy ' !\n",
    ),
    (
        "ptb",
        "the dow n't fell N N to N on banks ' fears of the company 's $ N million <unk> and\\/or losses",
        "the down't fell 1 1 to 1 on banks' fears of the company's $1 million ? and/or losses",
    ),
    ("ptb", "rates rose to N N N N from # N", "rates rose to 1 1 1 1 from # N"),
    (
        "lm1b",
        'He said : " We \'ll see " , and paid $ 5 ( about £ 3 ) at http : / / example.org / news ?',
        'He said: "We\'ll see", and paid $5 (about £3) at http://example.org/news?',
    ),
    (
        "lm1b",
        "They won 3 / 4 of the games ; why not [ all ] of them ! It 's 'so ' they say .",
        "They won 3/4 of the games; why not [all] of them! It's'so ' they say.",
    ),
    ("lambada", "  “I know,” she said.\n“Do you?”  ", '\n"I know," she said.\n"Do you?"'),
    (
        "scientific-papers",
        "we study ( see [ 3 ] ) the effect , which is xmath0 . it is small . ",
        "we study (see [3]) the effect, which is xmath0. it is small. ",
    ),
]

# sha256 over every line of a real file, detokenised by the released code, each followed by a NUL
REAL = [
    ("ptb", "ptb/ptb.test.txt", str.strip, "22dac0c936475ed773affd123f133e25d7885d744385aaf65874479fe6cdb024"),
    (
        "wikitext",
        "wikitext-2/test.txt",
        lambda line: wikitext_line(line.removesuffix("\n")),
        "a2a7268b7592564835805c3af7680e9ebd442dcca4d94d667ef01ece3b6bfae1",
    ),
    ("lm1b", "wikitext-2/test.txt", str.strip, "c4fdde896c97dfb1af7cd2b551ad00a241a06892d003707bc9cb005003a258fd"),
    (
        "scientific-papers",
        "arxiv-standin/arxiv_sample.txt",
        str.strip,
        "c52fa64de3e988397afda3a8af0053e0c5c9bce6b73c377b35167dbe985071be",
    ),
    (
        "lambada",
        "lambada/lambada_test.jsonl",
        lambda line: json.loads(line)["text"],
        "a31ee520fc4e30c09bfcfb871474f7b6c1d125168216b26a3758d0331c82433d",
    ),
]


@pytest.mark.parametrize(("name", "spaced", "written"), VECTORS)
def test_a_line_is_detokenised_as_in_the_released_code(name, spaced, written):
    assert DETOKENISERS[name](spaced) == written


@pytest.mark.parametrize(("name", "file", "text", "digest"), REAL, ids=[row[0] for row in REAL])
def test_a_real_file_is_detokenised_as_in_the_released_code(name, file, text, digest, data_folder):
    seen = hashlib.sha256()
    with (data_folder / file).open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            seen.update(f"{DETOKENISERS[name](text(line))}\0".encode())
    assert seen.hexdigest() == digest
