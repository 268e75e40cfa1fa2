"""The arguments of `adlm serve`."""

import argparse
from pathlib import Path

from adlm.cli.arguments import add_subcommand as add_subcommand

EXAMPLE = """adlm serve
  adlm serve runs/own
  adlm serve runs/own runs/mdlm --port 8080 --api-key-file key.txt

  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"model": "own", "prompt": "Fellow citizens", "suffix": " the Union.", "max_tokens": 12, "seed": 0}'

The name of a model is that of its folder. The address, opened in a browser, is the studio: a page to fill in texts and
watch every step. docs/serving.md describes requests, limits and batching."""

KEY_VARIABLE = "ADLM_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "models",
        metavar="MODEL",
        nargs="*",
        default=["box"],
        help="run folder, model folder, or owner/name on the Hugging Face hub\n"
        "(default: box, the small model that comes with adlm)",
    )
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000, metavar="P", help="port; 0 is any free port (default: 8000)")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the key that clients must send (default: the environment variable {KEY_VARIABLE}, or no key)",
    )
    add("--device", default="auto", metavar="D", help="auto, cuda or cpu (default: auto, a GPU if available)")
    add("--batch", type=int, metavar="B", help="rows per network call (default: 4, on a GPU 16)")
    add("--queue", type=int, default=256, metavar="N", help="completions that may wait for a model (default: 256)")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds until a request fails (default: 300)")
    add("--max-steps", type=int, default=1024, metavar="T", help="largest number of sampling steps (default: 1024)")
    add("--max-rows", type=int, default=16, metavar="N", help="completions per request, prompts x n (default: 16)")
