"""A federator of the published protocol as a process, to be killed: configured by the published
environment, it runs until a signal ends it."""

import asyncio
import logging
import os

from holdfast.federation.sidecar.paper.federator import run
from holdfast.federation.sidecar.paper.settings import PaperSettings

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(run(PaperSettings.from_environment(os.environ)))
