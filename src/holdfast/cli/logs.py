"""The process's own log lines, on standard error."""

import json
import logging
import sys


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def set_up_logging(level: str, format: str) -> None:
    """`level`: a name of logging's in lower case; `format`: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    if format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z")
        )
    logger = logging.getLogger("holdfast")
    logger.setLevel(level.upper())
    logger.handlers = [handler]
    logger.propagate = False
