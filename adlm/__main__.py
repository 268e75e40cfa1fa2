"""`python -m adlm` is the command `adlm`; torchrun starts it as `torchrun ... -m adlm train ...`."""

import sys

from adlm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
