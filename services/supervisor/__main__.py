"""The command line: `finback`, or `python -m finback.services.supervisor`."""

import sys

from finback.services.supervisor.cli import run

main = run

if __name__ == "__main__":
    sys.exit(main())
