"""`python -m finback.services.drafter`: the drafter service as a process."""

import sys

from finback.services.drafter.service import DrafterService
from finback.shared.actor.process import run

if __name__ == "__main__":
    sys.exit(run(DrafterService))
