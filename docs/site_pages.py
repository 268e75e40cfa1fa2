"""Hooks of mkdocs: commands.md, presets.md and options.md are what the program prints, box.md is the model's card.

Files of the repository outside docs/ that a page links to are part of the site, too, under repository/.
"""

import contextlib
import io
import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from adlm.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?:(?<=\]\()|(?<=href=\"))(?!https?:|#)[^)#\s\"]+")
OPTION = re.compile(r"(?<=[\s>(])--[a-z][\w-]*(?![^<]*>)")  # outside of tags
BOX = "adlm/box/README.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, text in {"commands.md": _commands(), "presets.md": _presets(), "options.md": _options()}.items():
        files.append(File.generated(config, name, content=text))
    linked = [BOX, *(path for file in files.documentation_pages() for path in _linked(file))]
    for path in linked:  # grows with the links of the pages that are added
        if not path.startswith("docs/") and files.get_file_from_path(_uri(path)) is None:
            file = File.generated(config, _uri(path), abs_src_path=str(ROOT / path))
            files.append(file)
            linked += _linked(file) if path.endswith((".md", ".html")) else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    return LINK.sub(lambda link: os.path.relpath(_uri(_target(uri, link[0])), os.path.dirname(uri) or "."), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return OPTION.sub(r'<span class="option">\g<0></span>', html)  # no line break after a hyphen


def _uri(path: str) -> str:
    """Where a file of the repository is on the site."""
    return "box.md" if path == BOX else path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def _target(uri: str, link: str) -> str:
    """The path in the repository that a link on the page `uri` leads to; of a folder, its README."""
    path = (
        BOX if uri == "box.md" else uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
    )
    target = os.path.normpath(os.path.join(os.path.dirname(path), link))
    return f"{target}/README.md" if (ROOT / target).is_dir() else target


def _linked(file: File) -> list[str]:
    return [_target(file.src_uri, link) for link in LINK.findall(file.content_string)]


def _printed(*arguments: str) -> str:
    """What `adlm ARGUMENTS` prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main(arguments)
    return output.getvalue()


def _commands() -> str:
    parts = ["# Commands\n\nWhat `adlm COMMAND --help` prints. A user error is one line, with exit code 2.\n"]
    parts += [f"## adlm {name}\n\n```output\n{_printed(name, '--help')}```\n" for name in COMMANDS]
    return "\n".join(parts)


def _presets() -> str:
    rows = [f"| `{name}` | {line} |\n" for name, line in json.loads(_printed("presets", "--json")).items()]
    return (
        "# Presets\n\nA preset is a name of this table, and options after it override its own: "
        f"`adlm train owt/adlm model=tiny train.steps=1000`.\n\n| preset | what it is |\n|---|---|\n{''.join(rows)}"
    )


def _options() -> str:
    text = _printed("presets", "owt/adlm", "--explain")
    parts = ["# Options\n\nEvery option with its value in `owt/adlm`: `adlm presets owt/adlm --explain`.\n"]
    for block in text.strip().split("\n\n"):
        names = ", ".join(re.findall(r"^(\w+):", block, re.MULTILINE))
        parts.append(f"## {names}\n\n```yaml\n{block}\n```\n")
    return "\n".join(parts)
