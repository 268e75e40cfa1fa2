"""`adlm reason`: fine-tune a causal language model to solve problems, evaluate it, and watch it solve one problem."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

from adlm.cli.console import Console, Progress
from adlm.cli.train import resolve_run, train_and_report
from adlm.errors import UserError
from adlm.files import check_output, file_sha256, replacing
from adlm.request import Request, option

if TYPE_CHECKING:  # importing torch takes seconds
    from adlm.apps.reasoning.problems import Problem, Problems
    from adlm.apps.reasoning.solve import Score, Solution, Solver


@dataclass(frozen=True)
class ReasonTrainRequest(Request):
    """Train or resume a run."""

    action = "train"
    example = """adlm reason train prosqa/small --out runs/prosqa
  adlm reason train prosqa/gpt2 reason.method=coconut --out runs/coconut"""

    overrides: tuple[str, ...] = option("a preset such as prosqa/small, then option=value", (), positional=True)
    out: Path | None = option("run folder (default: runs/PRESET)", None, metavar="RUN")
    json: bool = option("print the result as one line of JSON", False)


@dataclass(frozen=True)
class ProblemsRequest(Request):
    """A model, and the problems that it solves."""

    model: Path = option("a run or model folder of adlm reason train", positional=True)
    data: str | None = option(
        "gsm8k, prosqa or prontoqa (in data.root or ADLM_DATA), or a file of problems; default: as trained",
        None,
        metavar="NAME_OR_FILE",
    )
    root: str | None = option("folder of the corpora (default: as trained, else ADLM_DATA)", None, metavar="DIR")
    split: Literal["test", "valid", "train"] = option("the part of the data", "test")
    device: str = option("auto, cuda or cpu (default: auto)", "auto")


@dataclass(frozen=True)
class ReasonEvalRequest(ProblemsRequest):
    """Measure exact-match accuracy on a set of problems."""

    action = "eval"
    example = "adlm reason eval runs/prosqa --data prosqa --out answers.jsonl"

    limit: int | None = option("solve the first N problems only", None, minimum=1)
    slots: tuple[int, ...] = option(
        "numbers of slots to evaluate (default: of the last stage)", (), minimum=0, maximum=1000
    )
    out: Path | None = option("write every answer as a line of JSON", None)
    force: bool = option("replace an existing FILE", False)
    json: bool = option("print the result as one line of JSON", False)


@dataclass(frozen=True)
class ReasonShowRequest(ProblemsRequest):
    """Show one problem being solved: slots, their labels, the answer."""

    action = "show"
    example = "adlm reason show runs/prosqa --data prosqa --problem 7"

    problem: int = option("which problem, from 1 on", 1)
    json: bool = option("print JSON", False)


def run(request: ReasonTrainRequest | ReasonEvalRequest | ReasonShowRequest) -> int:
    if isinstance(request, ReasonTrainRequest):
        return _train(request)
    return _evaluate(request) if isinstance(request, ReasonEvalRequest) else _show(request)


def _train(request: ReasonTrainRequest) -> int:
    steps = next((override for override in request.overrides if override.startswith("train.steps=")), None)
    if steps is not None:
        raise UserError(f"{steps}: reason.epochs and the number of problems decide the steps; give reason.epochs")
    out, config = resolve_run(request.overrides, request.out)
    from adlm.apps.reasoning.training import open_reasoning_task, with_steps

    return train_and_report(with_steps(config), out, open_reasoning_task, request.json)


def _evaluate(request: ReasonEvalRequest) -> int:
    solver, name, part, problems = _open(request)
    if request.slots and solver.method.slots == "none":
        raise UserError(f"--slots {request.slots[0]}: {solver.reason.method} has no slots; leave it out")
    check_output(request.out, force=request.force, inputs=[part.path] if part.path else [])
    from adlm.apps.reasoning.solve import score

    problems = problems[: request.limit]
    results = []
    with ExitStack() as stack:
        file = None
        if request.out is not None:
            file = stack.enter_context(stack.enter_context(replacing(request.out)).open("w", encoding="utf-8"))
        for num_slots in request.slots or [solver.last_stage.slots]:
            solutions = []
            with Progress(Console(stderr=True), "solving", len(problems)) as bar:
                for solution in solver.solve(problems, num_slots, name):
                    solutions.append(solution)
                    bar.update(len(solutions))
            results.append(_result(solver, name, part, num_slots, score(solutions)))
            if file is not None:
                file.writelines(f"{json.dumps(_line(solution, num_slots))}\n" for solution in solutions)
    if request.json:
        sys.stdout.write(f"{json.dumps(results[0] if len(results) == 1 else results)}\n")
        return 0
    console = Console()
    for result in results:
        _print_result(console, result)
    if request.out is not None:
        console.print(f"answers: {request.out}", style="dim")
    return 0


def _open(request: ProblemsRequest) -> tuple["Solver", str, "Problems", Sequence["Problem"]]:
    """The model, the name of the corpus, where the problems are from, and the problems."""
    from adlm.apps.reasoning.problems import ProblemFile, problem_parts, problem_set, problem_sets
    from adlm.apps.reasoning.solve import load_solver
    from adlm.distributed import device_of

    solver = load_solver(request.model, device_of(request.device))
    config, name = solver.config, solver.config.data.name
    part: Problems
    data = request.data or name
    if data not in problem_sets():
        file, readers = Path(data), problem_set(name).readers
        if file.suffix not in readers or not file.is_file():
            names, forms = ", ".join(problem_sets()), ", ".join(readers)
            raise UserError(f"--data {data} is not one of {names}, nor a file of problems ({forms})")
        part = ProblemFile(file, file.name, request.split, readers)
    else:
        trained_on = config.data.root if Path(config.data.root).is_dir() else ""
        num = config.data.problems if data == name else 0  # generated ones are those of the training
        section = replace(config.data, name=data, problems=num, root=request.root or trained_on)
        parts = problem_parts(section)
        if request.split not in parts:
            raise UserError(f"--split {request.split}: {data} has {', '.join(parts)} only")
        name, part = data, parts[request.split]
    problems = list(part.problems())
    if not problems:
        raise UserError(f"--data {data}: there is no problem in it")
    return solver, name, part, problems


def _result(solver: "Solver", name: str, part: "Problems", num_slots: int, found: "Score") -> dict[str, Any]:
    path = part.path
    return {
        "method": solver.reason.method,
        "base": solver.reason.base,
        "data": name,
        "file": None if path is None else path.name,
        "sha256": None if path is None else file_sha256(path),
        "generated": part.name if path is None else None,
        "seed": solver.config.train.seed,
        "slots": num_slots,
        **asdict(found),
        "accuracy": found.share,
    }


def _line(solution: "Solution", num_slots: int) -> dict[str, Any]:
    problem = solution.problem
    return {
        "question": problem.question,
        "expected": problem.answer,
        "answer": solution.answer,
        "right": solution.is_right,
        "written": solution.written,
        "tokens": solution.num_tokens,
        "ended": solution.ended,
        "hops": len(problem.steps),
        "num_slots": num_slots,
        "labels": solution.labels,
        "slots": [tokens[0][0] for tokens in solution.slots],
    }


def _print_result(console: Console, result: dict[str, Any]) -> None:
    low, high = result["interval"]
    slots = "1 slot" if result["slots"] == 1 else f"{result['slots']} slots"
    problems = f"{result['data']} ({result['generated']})" if result["generated"] else result["data"]
    console.print(
        f"{result['method']} with {slots} on {problems}: {result['right']} of {result['num']} "
        f"right, {result['accuracy']:.1%} (95% interval {low:.1%} to {high:.1%}), {result['tokens']:.1f} tokens written"
    )
    hops = (f"{count} {right}/{num}" for count, (right, num) in result["by_hops"].items())
    console.print(f"by the number of steps: {', '.join(hops)}", style="dim")
    if result["slots_right"]:
        shares = (f"{right / num:.0%}" for right, num in result["slots_right"])
        console.print(f"labels predicted, from the first on: {' '.join(shares)}", style="dim")


def _show(request: ReasonShowRequest) -> int:
    solver, name, part, problems = _open(request)
    if not 1 <= request.problem <= len(problems):
        raise UserError(f"--problem {request.problem} must be from 1 to {len(problems)}")
    [solution] = solver.solve([problems[request.problem - 1]], data=name)
    if request.json:
        line = _line(solution, solver.last_stage.slots)
        sys.stdout.write(f"{json.dumps({**line, 'steps': solution.problem.steps, 'slots': solution.slots})}\n")
        return 0
    console = Console()
    console.print(Text(f"problem {request.problem} of {part.name}", style="dim"))
    console.print(Text(solution.problem.question))
    for step in solution.problem.steps:
        console.print(Text(f"  {step}", style="dim"))
    if solution.slots:
        table = Table("slot", "label", "most likely tokens", box=None, pad_edge=False)
        for number, tokens in enumerate(solution.slots):
            shown = Text("  ".join(f"{token!r} {share:.0%}" for token, share in tokens), style="dim")
            label = ""
            if number < len(solution.slots_right):
                label = solution.labels[number]
                shown.stylize("bold green" if solution.slots_right[number] else "red", 0, len(f"{tokens[0][0]!r}"))
            table.add_row("[BOA]" if number == 0 else str(number), label, shown)
        console.print(table)
    console.print(Text(solution.written, style="bold"))
    mark = "right" if solution.is_right else f"wrong: expected {solution.problem.answer}"
    console.print(mark, style="green" if solution.is_right else "red")
    return 0
