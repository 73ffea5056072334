"""One rank of `zerobubble bench`, as a script: torchrun started from a warm process takes a file."""

import sys

from megatron.zerobubble.cli.bench import main

if __name__ == "__main__":
    sys.exit(main())
