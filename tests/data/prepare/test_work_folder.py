"""The output folder of `prepare`: only files that it wrote are replaced, and errors are raised before the work."""

import json
import os
import shutil
from pathlib import Path

import pytest
from texts import prose

from adlm import files
from adlm.data.prepare import prepare as preparing
from adlm.data.prepare.prepare import prepare
from adlm.data.prepare.prepared import NOTES, open_prepared
from adlm.data.sources import source
from adlm.errors import UserError


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(prose(8, seed=i).strip() for i in range(40)))
    return path


@pytest.fixture
def words(text, bpe) -> list[str]:
    return [f"data.path={text}", "data.boundary=line", "data.held_out=0.2", f"tokenizer={bpe}", "length=32"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_rebuild_deletes_only_what_it_replaced(words, resolve_config, tmp_path):
    prepare(resolve_config(*words), tmp_path / "out")
    (tmp_path / "out.old").mkdir()
    (tmp_path / "out.old/thesis.txt").write_text("years of work")
    assert prepare(resolve_config(*words, "data.seed=5"), tmp_path / "out").how == "prepared anew"
    assert names(tmp_path) == ["out", "out.old", "text.txt"]
    assert names(tmp_path / "out.old") == ["thesis.txt"]


def test_a_working_folder_that_prepare_did_not_write_is_refused(words, resolve_config, tmp_path):
    (tmp_path / "out.preparing/train").mkdir(parents=True)
    (tmp_path / "out.preparing/train/thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"out\.preparing is not what a run .* left behind \(it holds train\)"):
        prepare(resolve_config(*words), tmp_path / "out")
    assert names(tmp_path / "out.preparing/train") == ["thesis.txt"]
    (tmp_path / "out.preparing/lock").touch()
    (tmp_path / "out.preparing/notes.txt").touch()
    with pytest.raises(UserError, match=r"it holds notes\.txt"):
        prepare(resolve_config(*words), tmp_path / "out")


@pytest.mark.parametrize("name", ["thesis.txt", "train/thesis.txt", "notes/thesis.txt"])
def test_a_folder_with_files_of_the_user_is_not_replaced(words, resolve_config, tmp_path, name):
    prepare(resolve_config(*words), tmp_path / "out")
    (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / name).write_text("years of work")
    assert prepare(resolve_config(*words), tmp_path / "out").how == "reused"
    with pytest.raises(UserError, match=r"would be prepared anew, and it holds (notes|.*thesis\.txt)"):
        prepare(resolve_config(*words, "data.seed=5"), tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "years of work"


def test_a_folder_of_another_source_is_not_replaced(words, resolve_config, tmp_path):
    prepare(resolve_config(*words), tmp_path / "out")
    (tmp_path / "other.txt").write_text("Other words. " * 50)
    with pytest.raises(UserError, match=r"was prepared from .*text\.txt, and this is .*other\.txt; give another --out"):
        prepare(resolve_config(f"data.path={tmp_path / 'other.txt'}", *words[1:]), tmp_path / "out")


def test_a_failed_move_leaves_the_old_folder_where_it_was(words, resolve_config, tmp_path, monkeypatch):
    prepare(resolve_config(*words), tmp_path / "out")
    rename = Path.rename

    def refusing(self, target):
        if self.name == "out.preparing":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)  # a file system that cannot
    with pytest.raises(UserError, match=r"cannot be written: Input/output error"):
        prepare(resolve_config(*words, "data.seed=5"), tmp_path / "out")
    assert open_prepared(tmp_path / "out").manifest["recipe"]["held_out"]["seed"] == 0


@pytest.mark.parametrize("place", [".", "", "../here"])
def test_the_output_may_be_the_current_folder(words, resolve_config, tmp_path, monkeypatch, place):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = prepare(resolve_config(*words), Path(place)).prepared
    assert made.folder == tmp_path / "here"
    assert len(open_prepared(tmp_path / "here").rows("train"))


def test_a_link_to_a_folder_stays_a_link(words, resolve_config, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/real")
    for seed in (0, 5):
        prepare(resolve_config(*words, f"data.seed={seed}"), tmp_path / "out")
        assert (tmp_path / "out").is_symlink()
        assert names(tmp_path / "disk") == ["real"]


def test_a_mount_point_is_refused_before_anything_is_read(words, resolve_config, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "out")
    monkeypatch.setattr(preparing, "resolve_source", None)
    with pytest.raises(UserError, match=r"out is a mount point.*give a folder in it"):
        prepare(resolve_config(*words), tmp_path / "out")


def test_a_name_that_is_too_long_is_a_user_error(words, resolve_config, tmp_path):
    for name in ("x" * 300, "x" * 250):
        with pytest.raises(UserError, match=r"cannot be (written|used)"):
            prepare(resolve_config(*words), tmp_path / name)
    with pytest.raises(UserError, match=r"data\.path x+ cannot be read"):
        source.resolve_source(resolve_config(f"data.path={'x' * 300}").data)


def test_the_prepared_folder_is_not_read_as_text(words, text, resolve_config, tmp_path):
    (tmp_path / "all").mkdir()
    shutil.copy(text, tmp_path / "all")
    words = [f"data.path={tmp_path / 'all'}", *words[1:]]
    prepare(resolve_config(*words), tmp_path / "all/out")
    (tmp_path / "all/out.preparing").mkdir()
    (tmp_path / "all/out.preparing/recipe.json").write_text("{}")
    assert prepare(resolve_config(*words), tmp_path / "all/out").how == "reused"
    listed = json.loads((tmp_path / "all/out/manifest.json").read_text())["recipe"]["parts"]
    assert [part["name"] for part in listed] == ["text.txt"]


def test_a_run_interrupted_at_the_final_move_resumes(words, resolve_config, tmp_path, monkeypatch):
    def cut_off(work, out):
        for name in NOTES:
            (work / name).unlink(missing_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "publish", cut_off)
        with pytest.raises(KeyboardInterrupt):
            prepare(resolve_config(*words), tmp_path / "out")
    prepare(resolve_config(*words), tmp_path / "out")
    assert names(tmp_path) == ["out", "text.txt"]
    assert names(tmp_path / "out") == ["manifest.json", "special_tokens_map.json", "tokenizer.json", "train", "valid"]


def test_a_read_only_prepared_folder_can_be_used(words, resolve_config, tmp_path, monkeypatch):
    prepare(resolve_config(*words), tmp_path / "out")

    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(preparing, "write_manifest", read_only)
    made = prepare(resolve_config(*words, "length=16", "data.packing=padded"), tmp_path / "out").prepared
    assert made.rows("train").length == made.manifest["length"] == 16
    assert made.manifest["packing"] == "padded"


def test_an_error_about_a_missing_source_names_the_source(words, text, resolve_config, tmp_path, monkeypatch):
    tokenise = preparing._tokenise

    def vanishing(*arguments):
        text.unlink()
        return tokenise(*arguments)

    monkeypatch.setattr(preparing, "_tokenise", vanishing)
    with pytest.raises(UserError, match=r"^text\.txt cannot be read: No such file"):
        prepare(resolve_config(*words), tmp_path / "out")


@pytest.mark.parametrize("change", ["longer", "touched"])
def test_a_file_that_changes_while_it_is_read_is_refused(words, text, resolve_config, tmp_path, monkeypatch, change):
    tokenise = preparing._tokenise

    def meanwhile(*arguments):
        if change == "longer":
            text.write_text(text.read_text() + " more")
        else:
            os.utime(text, ns=(1, 1))
        return tokenise(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_tokenise", meanwhile)
        with pytest.raises(UserError, match=r"text\.txt changed while it was read"):
            prepare(resolve_config(*words), tmp_path / "out")
    assert prepare(resolve_config(*words), tmp_path / "out").how in ("prepared", "resumed")
