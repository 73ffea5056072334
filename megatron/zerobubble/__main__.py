"""`python -m megatron.zerobubble`: the command `zerobubble`."""

import sys

from megatron.zerobubble.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
