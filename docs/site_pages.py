"""Hooks of mkdocs: commands.md, presets.md and options.md are what the program prints, box.md is the model's card.

Links to files of the repository outside docs/ become their paths: the site does not contain them.
"""

import contextlib
import io
import json
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from adlm.checkpoints.model_folder import BOX_FOLDER
from adlm.cli.main import COMMANDS, main

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    card = (BOX_FOLDER / "README.md").read_text(encoding="utf-8")
    pages = {"commands.md": _commands(), "presets.md": _presets(), "options.md": _options(), "box.md": card}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)


def _printed(*arguments: str) -> str:
    """What `adlm ARGUMENTS` prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main(arguments)
    return output.getvalue()


def _commands() -> str:
    parts = ["# Commands\n\nWhat `adlm COMMAND --help` prints. A user error is one line, with exit code 2.\n"]
    parts += [f"## adlm {name}\n\n```text\n{_printed(name, '--help')}```\n" for name in COMMANDS]
    return "\n".join(parts)


def _presets() -> str:
    rows = [f"| `{name}` | {line} |\n" for name, line in json.loads(_printed("presets", "--json")).items()]
    return (
        "# Presets\n\nA preset is a name of this table, and options after it override its own: "
        f"`adlm train owt/adlm model=tiny train.steps=1000`.\n\n| preset | what it is |\n|---|---|\n{''.join(rows)}"
    )


def _options() -> str:
    text = _printed("presets", "owt/adlm", "--explain")
    first = "Every option with its value in `owt/adlm`: `adlm presets owt/adlm --explain`."
    return f"# Options\n\n{first}\n\n```yaml\n{text}```\n"
