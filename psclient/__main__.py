"""``python -m psclient``."""

import sys

from psclient.cli import main

if __name__ == "__main__":
    sys.exit(main())
