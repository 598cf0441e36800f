"""The log of the agent has the reasons of events."""

import logging
import sys

from vlm_local.agent.__main__ import Formatter


def test_a_line_has_the_fields_that_were_given_with_it():
    record = logging.makeLogRecord(
        {"name": "agent", "levelname": "INFO", "msg": "status not written"}
        | {"pod": "/pods/p", "error": "away"}
    )
    assert (
        Formatter().format(record).endswith("INFO agent status not written pod=/pods/p error=away")
    )


def test_a_traceback_comes_last():
    try:
        raise ValueError("odd")
    except ValueError:
        record = logging.makeLogRecord(
            {"msg": "pod failed", "pod": "/pods/p", "exc_info": sys.exc_info()}
        )
    first, *_, last = Formatter().format(record).splitlines()
    assert first.endswith("pod failed pod=/pods/p")
    assert last == "ValueError: odd"
