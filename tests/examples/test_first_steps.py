"""The first example runs, and says nothing that cannot be: cut short, so that it has learnt little."""

import re
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "first_steps.py"


def test_the_first_steps_are_taken_and_no_bound_is_below_the_entropy(capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    main.__globals__.update(STEPS=20, BLOCKS=64)
    main()
    told = capsys.readouterr().out
    floor = float(re.search(r"no model pays less than ([\d.]+)", told)[1])
    bounds = re.findall(r"(\w+) pays at most ([\d.]+) ± ([\d.]+)", told)
    assert [name for name, _, _ in bounds] == ["adlm", "mdlm"]
    assert all(float(nats) > floor for _, nats, _ in bounds)
    infilled = re.search(r"infilled (.*)", told)[1].split()
    assert (infilled[1], infilled[5], infilled[8]) == ("fay", "slowly", "pond")
    first, *_, last = re.findall(r"t = \d\.\d\d (.*)", told)
    assert set(first.split()) == {"____"}
    assert "____" not in last
    assert re.search(r"of \d+ drawn sentences are sentences", told)
