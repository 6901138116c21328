"""``python -m psservice``."""

import sys

from psservice.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
