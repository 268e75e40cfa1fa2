"""The arguments of `adlm reproduce`."""

import argparse
from pathlib import Path

from adlm.apps.paper.published_tables import TABLES
from adlm.cli.arguments.perplexity import add_measurement_options
from adlm.likelihood.names import AUTO, ESTIMATOR_LINES

EXAMPLE = """adlm reproduce owt-ppl                                        print the published table
  adlm reproduce owt-ppl model.ckpt --tokenizer gpt2 --row adlm-262B --out owt.json --plot owt.svg
  adlm reproduce zero-shot zero-shot.json --row adlm-524B --markdown
  adlm reproduce generation cards/*.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "table",
        metavar="TABLE",
        help="\n".join(f"{name}: {table.title}" for name, table in TABLES.items()),
    )
    add(
        "models",
        nargs="*",
        default=[],
        metavar="MODEL",
        help="model folders, run folders, names on the hub or .ckpt files (with --tokenizer) to measure, or\n"
        "JSON results of "
        "`adlm perplexity --out` and `adlm judge --out`",
    )
    add(
        "--row",
        action="append",
        default=[],
        metavar="R",
        help="row of the table: once for all models, or once per model",
    )
    add("--markdown", action="store_true", help="print a Markdown table")
    add("--force", action="store_true", help="replace files that adlm did not write")
    add("--json", action="store_true", help="print JSON")
    add("--out", metavar="FILE", type=Path, help="write the comparison as JSON; rerun the same command to resume")
    add(
        "--plot",
        metavar="FILE",
        type=Path,
        help="plot published and measured values with error bars (.png, .svg, .pdf)",
    )
    measuring = parser.add_argument_group("options for measuring a model")
    add = measuring.add_argument
    add(
        "--data",
        nargs="+",
        metavar="DATA",
        help="the table's texts, such as a prepared folder (default: the corpora by name)",
    )
    add(
        "--estimator",
        default=AUTO,
        choices=(AUTO, *ESTIMATOR_LINES),
        help="estimator used in addition to the published one (default: auto)",
    )
    add_measurement_options(add, "that of the table")
