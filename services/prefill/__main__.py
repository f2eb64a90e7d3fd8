"""`python -m finback.services.prefill`: a worker process."""

import sys

from finback.shared.engine.worker_host import run

if __name__ == "__main__":
    sys.exit(run("prefill", sys.argv[1:]))
