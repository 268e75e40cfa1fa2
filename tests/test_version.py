"""The commit of the code."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from adlm import version


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_repository_with_this_code(tmp_path):
    source = tmp_path / "version.py"
    shutil.copy(version.__file__, source)
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "of another project")
    spec = importlib.util.spec_from_file_location("version_copy", source)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.code_commit() == version.UNKNOWN
    git(tmp_path, "add", "version.py")
    git(tmp_path, "commit", "-m", "its own")
    copy.code_commit.cache_clear()
    assert copy.code_commit() == git(tmp_path, "rev-parse", "--short", "HEAD")
