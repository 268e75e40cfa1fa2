"""A prepared folder whose files do not match is a user error and never used."""

import json

import pytest
from texts import prose

from adlm.data.prepare.prepare import prepare
from adlm.data.prepare.prepared import open_prepared
from adlm.errors import UserError
from adlm.tokens import load_tokenizer


@pytest.fixture
def folder(resolve_config, bpe, tmp_path):
    (tmp_path / "text.txt").write_text(prose(500))
    words = (f"data.path={tmp_path / 'text.txt'}", f"tokenizer={bpe}", "length=32")
    return prepare(resolve_config(*words), tmp_path / "out").prepared.folder


@pytest.mark.parametrize("name", ["tokenizer.json", "special_tokens_map.json"])
def test_a_tokenizer_that_does_not_match_the_ids_is_a_user_error(folder, name):
    if name == "tokenizer.json":
        load_tokenizer("bytes").save(folder)
    else:
        (folder / name).write_text(json.dumps({"mask_token": "a"}))
    with pytest.raises(UserError, match=r"tokenizer\.json is not the one that made the ids; delete the folder .*out "):
        open_prepared(folder)


WRONG = {
    "length": lambda manifest: manifest.update(length="32"),
    "packing": lambda manifest: manifest.update(packing="loose"),
    "source": lambda manifest: manifest.update(source=None),
    "dtype": lambda manifest: manifest["recipe"].update(dtype="float64"),
    "splits": lambda manifest: manifest["splits"].update({"../train": manifest["splits"]["train"]}),
    "counts of train": lambda manifest: manifest["splits"]["train"].update(tokens=-1),
    "files of train": lambda manifest: manifest["splits"]["train"].update(
        tokens=manifest["splits"]["train"]["tokens"] + 1
    ),
    "files of train ": lambda manifest: manifest["splits"]["train"].update(documents=2),
    "files of train  ": lambda manifest: manifest["splits"]["train"]["files"].pop(),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_manifest_that_does_not_match_its_files_is_a_user_error(folder, what):
    manifest = json.loads((folder / "manifest.json").read_text())
    WRONG[what](manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"is damaged \(ValueError: wrong {what.strip()}\); delete the folder .*out "):
        open_prepared(folder)
