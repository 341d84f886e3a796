"""Holdfast: an MQTT broker on one durable log, and the Spark pipeline that reads the same log.

The hot modules may be present in compiled form (mypyc) beside their source. Setting
HOLDFAST_INTERPRETED=1 before the first import runs the source of all of them, for debugging and
for testing both forms.
"""

import os

from holdfast._renamed import accept_old_names

__version__ = "0.1.0"

if os.environ.get("HOLDFAST_INTERPRETED"):
    from holdfast._interpreted import prefer_source

    prefer_source()

accept_old_names()
