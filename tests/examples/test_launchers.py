"""A dry run of the examples for Slurm and Kubernetes: which commands they start, with stubs in place of the cluster."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from small_models import mostly_slow
from torch.distributed.run import get_args_parser

from adlm.cli.main import COMMANDS
from adlm.config.load import resolve

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
METHODS = ("adlm", "mdlm", "sedd", "d3pm", "ar", "a2r")

# Each records its arguments. sbatch and srun start what they are given; torchrun lives until it is told to stop.
STUBS = {
    "sbatch": 'while [[ $1 == --* ]]; do shift; done; exec bash "$@"',
    "srun": 'exec "$@"',
    "scontrol": '[[ $1 == show ]] && printf "node-a\\nnode-b\\n"; true',
    "torchrun": 'trap "exit 143" TERM; while [[ -n $LIVES ]]; do sleep 0.05; done',
    "adlm": "true",
}

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A PATH with the stubs; returns what was called so far, as lists of words."""
    log = tmp_path / "calls"
    log.touch()
    for name, body in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        record = f"python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' {name} \"$@\" >> {log}"
        stub.write_text(f"#!/bin/bash\n{record}\n{body}\n")
        stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LIVES", "")
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def run_script(name: str, *words: str) -> None:
    result = subprocess.run(["bash", EXAMPLES / "slurm" / name, *words], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def check_torchrun(words: Sequence[str], endpoint: str) -> str:
    """The words are a command of torchrun for two machines that starts `adlm train`; returns the run folder."""
    parsed = get_args_parser().parse_args(words)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("2", "8", 3)
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint) == ("c10d", endpoint)
    assert (parsed.module, parsed.training_script, parsed.training_script_args[0]) == (True, "adlm", "train")
    overrides, _, out = " ".join(parsed.training_script_args[1:]).replace("--out ", "--out=").partition(" --out=")
    config = resolve(overrides.split())
    assert config.data.prepared
    assert config.train.batch_size % (2 * 8 * (config.train.micro_batch or 1)) == 0
    return out


@pytest.mark.parametrize("corpus", mostly_slow(["owt", "lm1b"], "owt"))
def test_slurm_trains_every_method_of_a_corpus_by_torchrun_on_all_machines(corpus, cluster):
    run_script(f"{corpus}.sh", f"prepared/{corpus}", "runs")
    outs = [check_torchrun(call[1:], "node-a:29500") for call in cluster() if call[0] == "torchrun"]
    assert {f"runs/{corpus}-{method}" for method in METHODS} < set(outs)
    assert len(set(outs)) == len(outs)


def test_slurm_prepares_a_text(cluster):
    run_script("prepare.sbatch", "owt/adlm", "prepared/owt")
    assert cluster()[-1] == ["adlm", "prepare", "owt/adlm", "--out", "prepared/owt"]
    assert "prepare" in COMMANDS


def test_a_slurm_job_that_is_told_to_stop_waits_for_the_run_and_is_queued_again(cluster, monkeypatch):
    monkeypatch.setenv("LIVES", "1")
    script = EXAMPLES / "slurm" / "train.sbatch"
    with subprocess.Popen(["bash", script, "owt/adlm", "prepared/owt", "runs/a"], stdout=subprocess.PIPE) as job:
        end = time.monotonic() + 60
        while not any(call[0] == "torchrun" for call in cluster()) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.5)  # the stub sets its trap
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0
    assert cluster()[-1] == ["scontrol", "requeue", "7"]


def test_kubernetes_trains_by_torchrun_in_every_pod():
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes" / "train.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert container["command"][0] == "torchrun"
    assert check_torchrun(container["command"][1:], f"{first}:29500") == "/data/runs/owt-adlm"
    assert spec["completionMode"] == "Indexed"
    assert (spec["completions"], spec["parallelism"]) == (2, 2)
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert float(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
