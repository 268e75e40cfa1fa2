"""Reasoning problems as a source: generated ones are the same however many processes make them."""

from adlm.data.sources import problem_files
from adlm.data.sources.problem_files import GeneratedProblems


def test_problems_generated_by_several_processes_are_those_of_one_in_order(monkeypatch):
    source = GeneratedProblems("prontoqa", 25, 3, exclude=())
    alone = list(source.problems())
    monkeypatch.setattr(problem_files, "PER_PROCESS", 10)
    assert list(source.problems()) == alone
    assert len(alone) == 25
