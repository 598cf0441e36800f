"""Logs on stderr: JSON lines with the fields given as `extra`, or text for a person."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, then the extra fields and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {k: v for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(fields, default=str)


def log_as_text() -> None:
    """Set up the root logger for a person at a terminal: problems only."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", force=True)
    logging.captureWarnings(capture=True)


def log_as_json(level: int = logging.INFO) -> None:
    """Set up the root logger; what libraries say below WARNING is left out."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for ours in ("vlm_worker", "vlm_kernels"):
        logging.getLogger(ours).setLevel(level)
    logging.captureWarnings(capture=True)
