"""Tests of the command line: results on standard output, user errors as one line with exit code 2."""

import argparse
import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from small_models import mostly_slow

from adlm.cli.main import COMMANDS, GROUPS, build_parser, main
from adlm.cli.presets import PresetsRequest
from adlm.registry import SAMPLERS


def test_presets_prints_one_line_per_preset(capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("owt/adlm ") and "anchored diffusion" in line for line in lines)


def test_presets_prints_a_resolved_preset_as_yaml_that_can_be_loaded_again(capsys, tmp_path):
    assert main(["presets", "owt/adlm", "anchor.tau=3"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["anchor"]["tau"] == 3
    (tmp_path / "own.yaml").write_text(text)
    assert main(["presets", str(tmp_path / "own.yaml")]) == 0
    assert capsys.readouterr().out == text


def test_presets_prints_descriptions_and_json(capsys):
    main(["presets", "owt/adlm", "--explain"])
    output = capsys.readouterr().out
    assert "# Weight of the anchor term in the ANELBO; 0 leaves the plain bound.\n  gamma: 0.003\n" in output
    main(["presets", "owt/adlm", "--json"])
    assert json.loads(capsys.readouterr().out)["method"] == "adlm"
    main(["presets", "owt/adlm", "--explain", "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["config"]["anchor"]["gamma"] == 3e-3
    assert content["meaning"]["anchor.gamma"] == "Weight of the anchor term in the ANELBO; 0 leaves the plain bound."
    main(["presets", "--json"])
    assert "owt/adlm" in json.loads(capsys.readouterr().out)


def test_parity_prints_a_table_and_a_summary(capsys, test_vectors):
    assert main(["parity", str(test_vectors)]) == 0
    out = capsys.readouterr().out
    assert "adlm denoiser_logits" in out
    assert "none out of tolerance" in out


def test_parity_prints_json_and_exits_with_1_if_a_tolerance_is_exceeded(capsys, test_vectors, tmp_path):
    for file in test_vectors.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((tmp_path / "golden.json").read_text())
    content["adlm_losses"]["val_loss"] += 0.001
    (tmp_path / "golden.json").write_text(json.dumps(content))
    assert main(["parity", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert [row["name"] for row in report["rows"] if not row["ok"]] == ["adlm val_loss"]
    assert main(["parity", str(tmp_path)]) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["party"], "there is no command 'party'; did you mean 'parity'?"),
        (["parity"], "the following arguments are required: FOLDER"),
        (["parity", "nowhere"], "nowhere/golden.json cannot be read"),
        (["presets", "--jsn"], "unrecognized arguments: --jsn; did you mean '--json'? (see adlm presets --help)"),
        (
            ["sample", "runs/own", "--promt", "Peace"],
            "--promt Peace; did you mean '--prompt'? (see adlm sample --help)",
        ),
        (["sample", "runs/own", "--top_p", "1"], "--top_p 1; as a config option: sampling.top_p=... (see adlm sample"),
        (
            ["sample", "runs/own", "--top-p=1"],
            "--top-p=1; as a config option: sampling.top_p=... (see adlm sample --help)",
        ),
        (["export", "--to", "hf"], "the following arguments are required: --out"),
        (["help"], "there is no command 'help'; try adlm --help"),
        (["plot", "runs/own"], "there is no command 'plot'; try adlm train --plot runs/own (see"),
        (
            ["generate", "--prompt", "The sea"],
            "there is no command 'generate'; try adlm sample --prompt 'The sea' (see",
        ),
        (
            ["sample", "The old man"],
            "'The old man' is neither a model folder, such as runs/own, nor a sampling option; a",
        ),
        (["help", "sample"], "there is no command 'help'; try adlm sample --help"),
        (["sample", "smolm2"], "; a text goes by --prompt smolm2; did you mean 'smollm2'?"),
        (["presets", "own", "init=smolm2"], "or owner/name on the hub; did you mean 'smollm2'?"),
        (["sample", "Hello"], "; a text goes by --prompt Hello"),
        (["sample", "box", "The old man"], "a text goes by --prompt 'The old man'"),
        (["sample", "word " * 100], "; a text goes by --prompt 'word"),
        (["train", "own", "--data", "x.txt"], "--data x.txt; your own text goes by data.path=x.txt (see adlm train"),
        (["prepare", "--data=x.txt", "--out", "x"], "your own text goes by data.path=x.txt (see"),
        (["reproduce"], "the following arguments are required: TABLE (see"),
        (["presets", "owt/adlm", "anchor.tau=-1"], "anchor.tau -1 must be at least 0"),
        (["presets", "anchor.gama=1"], "did you mean anchor.gamma?"),
        (["presets", "length=1"], "length 1 must be at least 2"),
        (["presets", "train.steps=many"], "train.steps 'many' must be a whole number"),
        (["presets", "vocabulary.size=9", "vocabulary.mask_id=9"], "vocabulary.mask_id 9 is outside the vocabulary"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(capsys, words, sentence):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.startswith("adlm: ")
    assert captured.err.count("\n") == 1


def _calls():
    """Every command, and every subcommand such as `bench train`, as it is called."""
    for name in COMMANDS:
        yield name
        for action in build_parser([name]).commands.choices[name]._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from (f"{name} {subcommand}" for subcommand in action.choices)


CALLS = list(_calls())


@pytest.mark.parametrize("command", CALLS)
def test_every_command_has_help_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert f"example:\n  adlm {command}" in capsys.readouterr().out


def test_the_help_of_sample_has_one_line_for_each_sampler(capsys):
    with pytest.raises(SystemExit):
        main(["sample", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in SAMPLERS:
        assert [line for line in lines if re.match(rf"  {name} +[A-Z].*\.$", line)], name


@pytest.mark.parametrize("command", sorted(set(CALLS) - {"bench", "reason", "completion", "lm-eval", "serve"}))
def test_every_command_that_reports_has_json(capsys, command):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert "  --json " in capsys.readouterr().out


def test_adlm_alone_shows_three_commands_that_exist(capsys):
    assert main([]) == 0
    *_, last = lines = capsys.readouterr().out.splitlines()
    called = [line.split()[1] for line in lines if line.startswith("  adlm ")]
    assert len(called) == 3
    assert set(called) <= set(COMMANDS)
    assert last == "adlm --help lists all commands"
    assert max(map(len, lines)) <= 80


def test_help_lists_every_command_once_by_purpose_in_80_columns(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:-1] for line in lines if re.fullmatch(r"[a-z ]+:", line)] == list(GROUPS)
    assert [line.split()[0] for line in lines if re.match(r"  \w[\w-]*  +\w", line)] == list(COMMANDS)
    assert max(map(len, lines)) <= 80
    for line in lines:
        if line.startswith("  example: "):
            command, *rest = shlex.split(line.removeprefix("  example: adlm "))
            build_parser([command]).parse_args([command, *rest])  # raises UserError if it does not parse


def test_options_before_the_command_are_a_user_error(capsys):
    assert main(["--jsn", "presets"]) == 2
    assert capsys.readouterr().err == "adlm: --jsn comes before the command; give the command first (see adlm --help)\n"
    assert main(["--prompt", "The"]) == 2
    assert "--prompt comes before the command" in capsys.readouterr().err
    assert main(["--", "presets"]) == 2  # what argparse says differs between versions of Python


@pytest.mark.processes
def test_too_little_virtual_memory_is_a_user_error_before_torch_is_imported():
    script = """
import resource, sys
from adlm.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, (1_000_000 * 1024,) * 2)
codes = [main(["sample"]), main(["presets", "own"])]
sys.exit(f"{codes} {'torch' in sys.modules}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == (
        "adlm: ulimit -v 1000000 leaves 1 GB of virtual memory, and torch needs 1.5; write ulimit -v unlimited\n"
        "[2, 0] False\n"
    )


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("can't start new thread"), "no more threads can be started; raise the limits (ulimit -u"),
        (MemoryError(), "out of memory; free some, raise the limit (ulimit -v), or use a smaller batch or model"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory; free some"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "out of memory; free some"),
    ],
    ids=repr,
)
def test_too_little_memory_or_too_few_threads_are_one_line(monkeypatch, capsys, error, sentence):
    def run(request: PresetsRequest):
        raise error

    monkeypatch.setattr("adlm.cli.presets.run", run)
    assert main(["presets"]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1


QUICK = [
    [],
    ["--help"],
    ["presets"],
    ["perplexity"],
    ["train", "owt/adlm", "train.stps=1"],
    ["trian"],
    ["judge", "--nothing"],
    ["judge", "nowhere.jsonl", "--metrics", "entropy"],
    ["judge", "nowhere.jsonl", "--metrics", "entropi"],
    ["perplexity", "box", "--data", "nowhere.txt"],
    ["perplexity", "box", "--data", "adlm", "--samples", "0"],
    ["perplexity", "box", "--data", "adlm", "--estimator", "best"],
    ["bench", "train", "owt/adlmm"],
    ["bench", "train", "owt/adlm", "--batch", "0"],
    ["bench", "sample", "owt/adlm", "sampling.stps=1"],
    ["plan", "owt/adlmm"],
    ["plan", "owt/adlm", "--gpu", "h10"],
    ["reproduce", "owt-pl"],
    ["reproduce", "owt-ppl", "--row", "nothing"],
    ["reproduce", "owt-ppl", "runs/own", "--data", "nowhere.txt"],
    ["import", "a.ckpt", "--out", "adlm"],
    ["export", "--out", "new", "--push", "nobody"],
    ["parity", "--help", "--json"],
    ["completion", "bash"],
    ["prepare", "--list"],
    ["prepare", "data.path=nowhere.txt", "--out", "new"],
    *([*command.split(), "--help"] for command in CALLS),
]


def test_help_and_wrong_usage_do_not_import_torch():
    script = f"""
import contextlib, io, sys
from adlm.cli.main import main
for words in {QUICK!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main(words)
    if "torch" in sys.modules:
        sys.exit(f"adlm {{words}} imports torch")
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


def test_adlm_and_its_help_import_neither_rich_nor_pydantic():
    script = """
import sys
from adlm.cli.main import main
main([])
try:
    main(["--help"])
finally:
    assert not {"rich", "pydantic", "numpy"} & set(sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


CLOSED = [["presets"], ["reproduce", "--help"], ["reproduce", "owt-ppl"], ["--version"]]


@pytest.mark.parametrize("words", mostly_slow(CLOSED, *CLOSED[:2]))
def test_a_closed_standard_output_is_not_an_error(words):
    command = [sys.executable, "-m", "adlm", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_output_that_is_not_a_terminal_is_never_wrapped(capsys, tmp_path, monkeypatch, test_vectors):
    """Even if COLUMNS is set."""
    long = "right" * 20
    (tmp_path / long).write_text('{"method": "acot", "accuracy": {"gsm8k": {"right": 600, "of": 1319}}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "30")
    for words, row, ends in (
        (["reproduce", "reasoning", long], f" acot  gsm8k  45.2  {long}  45.5 of 1,319  1.4 problems ", "agrees"),
        (["parity", str(test_vectors)], "adlm denoiser_logits ", "agrees"),
    ):
        assert main(words) == 0
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert any(line.startswith(" ".join(row.split())) and line.endswith(ends) for line in lines), lines
