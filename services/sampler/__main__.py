"""`python -m finback.services.sampler`: the sampler service as a process."""

import sys

from finback.services.sampler.service import SamplerService
from finback.shared.actor.process import run

if __name__ == "__main__":
    sys.exit(run(SamplerService))
