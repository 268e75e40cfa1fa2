"""`python -m adlm` runs the command `adlm`; with torchrun: `torchrun ... -m adlm train ...`."""

import sys

from adlm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
