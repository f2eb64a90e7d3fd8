"""`python -m finback.services.cache`: the cache service as a process."""

import sys

from finback.services.cache.service import CacheService
from finback.shared.actor.process import run

if __name__ == "__main__":
    sys.exit(run(CacheService))
