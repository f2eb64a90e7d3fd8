"""Compile the CPU kernels and keep them: a start then takes seconds. For set-up and image builds.

Runs one short generation of the embedded model in each numerics class; nothing else is started.
"""

import asyncio
import sys

from finback.shared import config as settings
from finback.shared.config import StackConfig
from finback.shared.engine.build import load_engine
from finback.shared.engine.output import StepOutput
from finback.shared.engine.warm_up import WarmUp
from finback.shared.errors import ConfigError


async def generate(config: StackConfig) -> None:
    warm_ups: list[WarmUp] = []

    def on_step(output: StepOutput) -> None:
        for warm_up in warm_ups:
            warm_up.on_step(output)

    engine = load_engine(config, on_step)
    warm_ups.append(WarmUp(engine))
    await engine.start()
    await warm_ups[0].run()
    await engine.stop()


def main() -> int:
    try:
        for deterministic in (False, True):
            overrides = {"deterministic": deterministic, "kv_pool_bytes": 64 * 2**20}
            config, _ = settings.load(env={}, overrides=overrides)
            asyncio.run(generate(config))
    except ConfigError as error:
        sys.stderr.write(f"kernels are not compiled ahead: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
