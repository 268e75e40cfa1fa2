"""The commit of the code."""

import shutil
import subprocess
from pathlib import Path

import pytest

import adlm


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_repository_with_this_code(tmp_path, monkeypatch):
    source = shutil.copy(adlm.__file__, tmp_path)
    monkeypatch.setattr(adlm, "__file__", source)
    code_commit = adlm.code_commit.__wrapped__  # not cached
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "of another project")
    assert code_commit() == adlm.UNKNOWN_COMMIT
    git(tmp_path, "add", "__init__.py")
    git(tmp_path, "commit", "-m", "its own")
    assert code_commit() == git(tmp_path, "rev-parse", "--short", "HEAD")
