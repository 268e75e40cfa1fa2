"""Every command in README and docs parses, options they name exist, links lead somewhere, and the site builds."""

import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints
from urllib.parse import unquote

import pytest
from browser import browser, chromium
from prose import FENCE

from adlm.bases.named import find_named_base
from adlm.cli.main import COMMANDS, build_parser, main
from adlm.config.schema import Config
from adlm.registry import SAMPLER_SUMMARIES

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for pattern in ("*.md", "docs/*.md", "experiments/**/*.md", "benchmarks/*.md", "examples/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
SETTING = re.compile(r"^([a-z]+)\.([a-z_0-9]+)=")


def commands(page: Path) -> list[str]:
    """The lines of shell blocks that call adlm, without comments and prefixes such as torchrun."""
    found = []
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.search(r"(?:^|\s|/)adlm (.*)", re.sub(r"\s#\s.*", "", line))
            if match and not line.lstrip().startswith(("#", "pip ", "git ", "sbatch ", "python experiments/")):
                found.append(match.group(1))
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


ALL = [(name_of(page), line) for page in PAGES for line in commands(page)]


def parse(line: str) -> None:
    """Raises UserError where adlm would."""
    name, *words = shlex.split(line)
    parser = build_parser([name]).commands.choices[name]
    if name == "lm-eval":  # all arguments are the harness's
        harness = pytest.importorskip("lm_eval._cli.harness", reason="lm-eval is not installed")
        harness.HarnessCLI()._parser.parse_args(["run", *words])
        return
    arguments, rest = parser.parse_known_args([word for word in words if word not in ("|", "...")])
    assert not rest or (hasattr(arguments, "overrides") and not any(word.startswith("-") for word in rest)), rest


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_inspect_in_the_text_names_its_folder(page):
    """Commands within sentences too: without --out, `adlm prepare` is refused."""
    for command in re.findall(r"`adlm (prepare [^`]*--inspect[^`]*)`", page.read_text()):
        assert "--out" in command, f"{name_of(page)}: adlm {command}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_rows_of_a_table_have_equally_many_cells(page):
    """GitHub splits a cell at every | that is not escaped, also inside of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\s*\|.*\n)+", text, re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines() if row.strip()}
        assert len(counts) == 1, f"{name_of(page)}: {table[:100]}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_blank_line_splits_no_table(page):
    """After a blank line a new table begins, which has a header."""
    lines = ["", *FENCE.sub("", page.read_text()).splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if line.lstrip().startswith("|") and not before.strip():
            assert re.fullmatch(r"\s*\|[-:| ]+\|\s*", after), f"{name_of(page)}: {line[:100]}"


def options() -> set[str]:
    """The names of all config options: section.option."""
    names = set()
    for section, kind in get_type_hints(Config).items():
        for part in (kind, *get_args(kind)):
            if is_dataclass(part):
                names |= {f"{section}.{field.name}" for field in fields(part)}
    return names


def test_there_are_commands_to_check():
    assert len(ALL) > 60
    assert {line.split()[0] for _, line in ALL} <= set(COMMANDS)


@pytest.mark.parametrize(("page", "line"), ALL, ids=[f"{page}: {line[:60]}" for page, line in ALL])
def test_commands_of_the_documentation_parse(page, line):
    parse(line)
    for word in shlex.split(line):
        if (match := SETTING.match(word)) and match[1] in {name.partition(".")[0] for name in options()}:
            assert f"{match[1]}.{match[2]}" in options(), f"{page} names an option that does not exist: {word}"


def test_options_of_the_guide_from_the_released_code_exist():
    """Of a cell such as `train.learning_rate`, `beta1` the later names are of the same section."""
    guide = (ROOT / "docs" / "from_released_code.md").read_text().partition("## Options")[2]
    known, checked = options(), 0
    for row in re.findall(r"^\|.*\|$", guide, re.MULTILINE)[2:]:
        section = ""
        for name in re.findall(r"`([a-z_0-9.]+)(?:=[^`]*)?`", row.split("|")[2]):
            section = name.partition(".")[0] if "." in name else section
            if "." in name or (section and f"{section}.{name}" in known):
                assert name in known or f"{section}.{name}" in known, name
                checked += 1
    assert checked > 30


def test_the_page_on_sampling_has_the_line_of_each_sampler():
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    for name, summary in SAMPLER_SUMMARIES.items():
        assert f"| `{name}` | {summary} |" in page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_lead_somewhere(page):
    generated = {"commands.md", "presets.md", "options.md"}
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
        assert target in generated or (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_files_that_are_named_exist(page):
    roots = [ROOT, ROOT / "adlm", ROOT / "tests", ROOT / "experiments", page.parent]
    for name in re.findall(r"`((?:[\w.-]+/)+\w+\.py)(?:::[^`]*)?`", page.read_text()):
        elsewhere = name.startswith("preprocessing/")  # of the released code of another paper
        assert elsewhere or any((root / name).is_file() for root in roots), f"{name_of(page)} names {name}"


def test_the_map_names_every_module_of_the_library_and_every_application():
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## The map")[2].partition("```")[2]
    named = set(re.findall(r"(?<![\w/])(\w+(?:\.py|/))", page.partition("```")[0]))
    folders = [ROOT / "adlm", ROOT / "adlm" / "apps"]
    files = {path.name for folder in folders for path in folder.glob("*.py") if not path.name.startswith("__m")}
    packages = {f"{path.parent.name}/" for folder in folders for path in folder.glob("*/__init__.py")}
    assert (files - {"__init__.py"}) | packages <= named


TINY = ["train.batch_size=4", "train.warm_up_steps=1", "train.valid_rows=4", "train.valid_every=0"]
TEXT = "\n\n".join(
    f"The captain of ship {n} said that the sea was very calm. He wept, and the crew sang." for n in range(99)
)


def shortened(line: str) -> list[str]:
    """The arguments of a command, with less to train."""
    name, *words = shlex.split(line)
    words = [re.sub(r"^train\.steps=\d+", "train.steps=6", word) for word in words]
    if name == "train" and not words[0].startswith("--"):
        width = [] if any(word.startswith("init=") for word in words) else ["model.hidden=16"]
        words += [*TINY, *width, "train.steps=4"]
    if name == "quickstart":
        words += [*TINY, "model.hidden=16", "train.steps=4", "data.path=texts/sea.txt", "tokenizer=bytes"]
    return [name, *words]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_the_commands_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch, capsys):
    """As they are written, but with four steps of training. Other tests cover `adlm serve`, which does not end.

    Commands of smollm2 are left out where its base weights are missing.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "sea.txt").write_text(TEXT)
    for line in commands(ROOT / page):
        without_base = "smollm2" in line and find_named_base("smollm2") is None
        if line.split()[0] not in ("serve", "completion", "doctor") and not without_base:
            assert main(shortened(line)) == 0, f"{line}: {capsys.readouterr().err}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation site, built as by `make docs`."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed; pip install 'adlm[docs]'")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere_and_its_links_lead_to_files_and_headings(site):
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    for page, text in pages.items():
        assert not re.search(r"<(?:script|img)[^>]*\ssrc=[\"']?https?:", text), page
        assert not re.search(r"<link[^>]*rel=[\"']?stylesheet[^>]*https?:", text), page
        for target in (
            re.findall(r"\s(?:href|src)=\"(?!https?:|data:|#|/\.)([^\"?]+)", text) if page.name != "404.html" else []
        ):
            path, _, anchor = target.partition("#")
            linked = (page.parent / unquote(path)).resolve()
            assert linked.is_file(), f"{page.relative_to(site)} links to {target}"
            assert not anchor or f'id="{unquote(anchor)}"' in pages[linked], (
                f"{page.relative_to(site)} links to {target}"
            )
    assert "adlm train own" in pages[site / "commands.html"]
    assert 'href="repository/notebooks/inference.ipynb"' in pages[site / "index.html"]


@pytest.mark.slow
def test_the_site_can_be_searched_from_its_files_and_fits_a_phone(site, tmp_path):
    binary = chromium()
    if binary is None:
        pytest.skip("Chromium is not installed; install it, or set ADLM_CHROMIUM")
    with browser(binary, tmp_path) as tab:
        tab.emulate(1280)
        tab.open(site / "index.html")
        assert tab.run("Array.from(document.querySelectorAll('article img'), (e) => e.naturalWidth > 0)") == [True]
        tab.run("document.querySelector('.md-search__input').focus()")
        tab.send("Input.insertText", text="remasking")
        tab.press("Shift")  # the search reads the field after a key
        tab.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")
        for width in (390, 1280):
            tab.emulate(width)
            tab.open(site / "sampling.html")
            cut = "Array.from(document.querySelectorAll('.language-bash code'), (e) => e.scrollWidth - e.clientWidth)"
            assert set(tab.run(cut)) == {0}, "long lines of code are wrapped"
            assert tab.run("document.documentElement.scrollWidth") == width
        assert not tab.problems
