"""A federator of the published protocol as a process, to be killed: configured by the published
environment, it runs until a signal ends it."""

import asyncio
import logging
import os

from holdfast.federator.paper import run
from holdfast.federator.paper_settings import PaperSettings

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(run(PaperSettings.from_environment(os.environ)))
