"""Problems that a generator must not make, such as a test set's. Knows no kind of problem, only forms of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from adlm.data.reasoning.problem import Problem, read_problems
from adlm.errors import UserError


@dataclass(frozen=True)
class Forbidden:
    """Forms, with the function that gives a problem's form: parted from it they would forbid nothing, silently."""

    form: Callable[[Problem], str]
    forms: frozenset[str]

    def __contains__(self, problem: Problem) -> bool:
        return self.form(problem) in self.forms


def forbidden_forms(paths: Iterable[Path], form: Callable[[Problem], str]) -> Forbidden:
    """Every problem of the files, and whatever has the same form.

    The forms are `content` (the same facts and question in any order: so much must be apart) and `structure` (the same
    under any renaming) of `prosqa` and `prontoqa`.
    """
    forms = set()
    for path in paths:
        for index, problem in enumerate(read_problems(path)):
            try:
                forms.add(form(problem))
            except UserError as error:
                raise UserError(f"{path}, entry {index}: {error}") from None
    return Forbidden(form, frozenset(forms))
