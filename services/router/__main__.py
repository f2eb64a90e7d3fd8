"""Start the router: `python -m finback.services.router`."""

import sys

from finback.services.router.service import Router
from finback.shared.actor.process import run

if __name__ == "__main__":
    sys.exit(run(Router))
