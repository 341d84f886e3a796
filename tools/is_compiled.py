"""Exit 0 if the hot modules are present in compiled form."""

import sys

import holdfast.protocol.mqtt.publish as publish

sys.exit(0 if str(publish.__file__).endswith(".so") else 1)
