"""`python -m finback.services.decode`: a worker process."""

import sys

from finback.shared.engine.worker_host import run

if __name__ == "__main__":
    sys.exit(run("decode", sys.argv[1:]))
