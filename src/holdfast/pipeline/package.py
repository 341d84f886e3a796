"""Packs the program as one zip that spark-submit sends to the executors, with a script for the
driver.
"""

import zipfile
from pathlib import Path
from typing import Final

import holdfast

ARCHIVE: Final = "holdfast-pipeline.zip"
SCRIPT: Final = "holdfast-pipeline.py"
PACKAGES: Final = ("holdfast", "holdfast_lab", "pyspark_holdfast")
NEEDED: Final = (
    "pyspark",
    "pyarrow",
    "pandas<3",
    "numpy",
    "msgspec",
    "zlib-ng",
    "deltalake",
    "obstore",
)
"""The packages that the driver or the executors import beside the archive."""

_SCRIPT_TEXT: Final = '''\
"""The driver's program for spark-submit; give it the words after `holdfast pipeline`."""

import sys

from holdfast.cli.main import main

sys.exit(main(["pipeline", *sys.argv[1:]]))
'''
_TIME: Final = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the archive. It is fixed, so that equal sources give equal archives."""


def write_package(directory: Path) -> tuple[Path, Path]:
    """Writes the archive and the script below `directory`, and returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / ARCHIVE
    root = Path(holdfast.__file__).parent.parent
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                member = zipfile.ZipInfo(str(path.relative_to(root)), _TIME)
                member.compress_type = zipfile.ZIP_DEFLATED
                file.writestr(member, path.read_bytes())
    script = directory / SCRIPT
    script.write_text(_SCRIPT_TEXT)
    return archive, script
