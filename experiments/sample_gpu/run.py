"""How fast ADLM small and AR small sample on one GPU: a line of JSON for each row of the table in benchmarks/README.md.

python experiments/sample_gpu/run.py > log.txt
"""

import json
import subprocess
import sys

PLAIN = ["sampling.top_p=1"]
ANCESTRAL = ["sampling.sampler=ancestral", *PLAIN]
LOOP = ["sampling.sampler=remdm-loop", "sampling.top_p=0.9"]
ROWS = {
    "ADLM, 1 sequence, T = 1024, ancestral": ["owt/adlm", "sampling.steps=1024", *ANCESTRAL],
    "ADLM, 1 sequence, T = 1024, remdm-loop p = .9": ["owt/adlm", "sampling.steps=1024", *LOOP],
    "ADLM, 1 sequence, T = 128, remdm-loop p = .9": ["owt/adlm", "sampling.steps=128", *LOOP],
    "ADLM, 8 sequences, T = 128, ancestral": ["owt/adlm", "sampling.steps=128", *ANCESTRAL, "--batch", "8"],
    "ADLM, 8 sequences, T = 128, remdm-loop p = .9": ["owt/adlm", "sampling.steps=128", *LOOP, "--batch", "8"],
    "ADLM, 64 sequences, T = 128, ancestral": [
        "owt/adlm",
        "sampling.steps=128",
        *ANCESTRAL,
        "--batch",
        "64",
        "--repeats",
        "1",
    ],
    "ADLM, 8 sequences, T = 128, confidence": [
        *["owt/adlm", "sampling.steps=128", "sampling.sampler=confidence", *PLAIN, "--batch", "8", "--repeats", "1"]
    ],
    "ADLM, 1 sequence, T = 128, remdm-conf": ["owt/adlm", "sampling.steps=128", "sampling.sampler=remdm-conf", *PLAIN],
    "ADLM, 1 sequence, T = 128, ancestral, plain": [
        "owt/adlm",
        "sampling.steps=128",
        *ANCESTRAL,
        "--plain",
        "--repeats",
        "1",
    ],
    "AR, 1 sequence, cache": ["owt/ar", *PLAIN],
    "AR, 8 sequences, cache": ["owt/ar", *PLAIN, "--batch", "8"],
    "AR, 1 sequence, prefix read anew": ["owt/ar", *PLAIN, "--plain", "--repeats", "1"],
}


def main() -> None:
    for title, words in ROWS.items():
        command = [sys.executable, "-m", "adlm", "bench", "sample", *words, "--json"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(run.stdout) if run.returncode == 0 else {"failed": run.stderr[-1500:]}
        print(json.dumps({"row": title, **found}), flush=True)


if __name__ == "__main__":
    main()
