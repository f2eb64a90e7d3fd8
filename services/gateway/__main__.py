"""`python -m finback.services.gateway`."""

import sys

from finback.services.gateway.service import GatewayService
from finback.shared.actor.process import run

if __name__ == "__main__":
    sys.exit(run(GatewayService))
