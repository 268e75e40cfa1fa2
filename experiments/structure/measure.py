"""How many files a reader of this package has to open: sizes, one-caller functions, and the modules on three ways.

    python experiments/structure/measure.py            # the checkout that holds this file
    python experiments/structure/measure.py --root DIR # another checkout, such as an earlier commit

The ways are found by running: `adlm sample` of the model in the box, one training step, and `adlm judge`, each with a
profile of the functions that are called. A module is on the way if one of its functions runs after import; it is
between the shell and the network if it is on the stack when the network is called.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

CORE = ("diffusion", "models", "inference", "sampling", "methods")
"""The mathematics and the networks; what remains of a way is what stands around them."""

WAYS = {
    "adlm sample": ["sample", "--length", "12", "--steps", "4", "--device", "cpu"],
    "adlm train, one step": [
        *("train", "own", "init=box", "data.path=text.txt", "train.steps=1", "train.batch_size=2", "train.device=cpu"),
        *("--out", "run"),
    ],
}

PROFILE = """
import os, sys
root = os.path.join(os.path.realpath(sys.argv[1]), "adlm") + os.sep
sys.path.insert(0, os.path.dirname(os.path.dirname(root)))
called, order, stack = set(), [], set()

def note(frame, event, argument):
    if event != "call":
        return
    code = frame.f_code
    if code.co_filename.startswith(root) and not code.co_name.startswith("<"):
        if is_import(frame):
            return
        called.add((code.co_filename[len(root):], code.co_firstlineno, code.co_qualname))
        if not order or order[-1] != code.co_filename[len(root):]:
            order.append(code.co_filename[len(root):])
        if code.co_name in ("hidden", "score"):  # a network call, while sampling or training
            while frame is not None:
                if frame.f_code.co_filename.startswith(root):
                    stack.add(frame.f_code.co_filename[len(root):])
                frame = frame.f_back

def is_import(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib") or frame.f_code.co_name == "<module>" and (
            frame.f_code.co_filename.startswith(root)
        ):
            return True
        frame = frame.f_back
    return False

from adlm.cli.main import main
sys.setprofile(note)
code = main(sys.argv[2:])
sys.setprofile(None)
import json
with open("way.json", "w") as file:
    json.dump([sorted(called), len(order), sorted(stack), code], file)
"""


def sizes(package: Path) -> dict[str, object]:
    """Counts over all Python files of the package."""
    files = sorted(package.rglob("*.py"))
    texts = {path: path.read_text() for path in files}
    lines = {path: text.count("\n") for path, text in texts.items()}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    classes = [node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = [
        (path, node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    words = Counter(word for text in texts.values() for word in re.findall(r"\b_\w+", text))
    private = {node.name for _, node in functions if node.name.startswith("_") and not node.name.startswith("__")}
    return {
        "modules": len(files),
        "lines": sum(lines.values()),
        "classes": len(classes),
        "class names defined more than once": sorted(name for name, num in Counter(classes).items() if num > 1),
        "functions": len(functions),
        "functions of at most four lines": sum(_body_lines(node) <= 4 for _, node in functions),
        "private functions with one caller": sum(words[name] == 2 for name in private),
        "modules under 80 lines": sum(num < 80 for num in lines.values()),
    }


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def way(root: Path, arguments: list[str]) -> dict[str, object]:
    """The modules whose functions run, and the lines of those functions."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text("The old man looked at the sea, and the sea looked back at him.\n" * 200)
        profile = Path(folder) / "called_functions.py"
        profile.write_text(PROFILE)
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        ended = subprocess.run(
            [sys.executable, str(profile), str(root), *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if ended.returncode or not (Path(folder) / "way.json").exists():
            raise SystemExit(f"adlm {' '.join(arguments)} failed:\n{ended.stdout}\n{ended.stderr}")
        called, switches, stack, code = json.loads((Path(folder) / "way.json").read_text())
    if code:
        raise SystemExit(f"adlm {' '.join(arguments)} ended with {code}:\n{ended.stderr}")
    modules = sorted({name for name, _, _ in called})
    lengths = {
        (str(path.relative_to(root / "adlm")), node.lineno): (node.end_lineno or 0) - node.lineno + 1
        for path in (root / "adlm").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    around = [name for name in modules if name.split("/")[0] not in CORE]
    return {
        "modules": len(modules),
        "of them outside the core": len(around),
        "functions": len(called),
        "lines of these functions": sum(lengths.get((name, line), 0) for name, line, _ in called),
        "changes of file": switches,
        "modules between the shell and the network": len(stack),
        "between the shell and the network": stack,
        "outside the core": around,
    }


def option_way(package: Path, option: str = "judge_reference") -> dict[str, object]:
    """The places that name one option of `adlm judge`."""
    found = {
        str(path.relative_to(package)): [
            number
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if re.search(rf"\b{option}\b|--{option.replace('_', '-')}\b", line)
        ]
        for path in sorted(package.rglob("*.py"))
    }
    found = {name: numbers for name, numbers in found.items() if numbers}
    return {"files": len(found), "lines": sum(map(len, found.values())), "where": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="a checkout")
    root = parser.parse_args().root.resolve()
    report = {"size": sizes(root / "adlm")}
    report.update({name: way(root, arguments) for name, arguments in WAYS.items()})
    report["one option of judge"] = option_way(root / "adlm")
    for name, entries in report.items():
        print(name)
        for key, value in entries.items():
            print(f"  {key}: {value if not isinstance(value, list | dict) else json.dumps(value)}")


if __name__ == "__main__":
    main()
