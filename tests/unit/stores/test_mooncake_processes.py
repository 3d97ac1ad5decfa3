"""What is said of a program of Mooncake that ended."""

from __future__ import annotations

import pytest

from stagetap.stores.mooncake_processes import end_in_words

START = (
    "WARNING: Logging before InitGoogleLogging() is written to STDERR\n"
    "E1130 19:28:19.092954 15358 transfer_metadata.cpp:1098] Local segment descriptor not found\n"
)
FATAL = "F1130 19:28:19.075179 16697 real_client_main.cpp:134] Failed to setup client: INVALID\n"
ERROR = "E1130 19:28:19.975179 16697 real_client.cpp:1020] Failed to allocate segment memory\n"


@pytest.mark.parametrize(
    ("code", "log", "said"),
    [
        (-9, "", "killed by SIGKILL"),
        (-9, START + ERROR, "killed by SIGKILL"),
        (-6, START, "killed by SIGABRT"),
        (
            -6,
            START + ERROR + FATAL + "*** Check failure stack trace: ***\n",
            f"killed by SIGABRT: {FATAL.strip()}",
        ),
        (1, "", "exit code 1"),
        (1, START, "exit code 1"),
        (1, START + ERROR + "W" + ERROR[1:], f"exit code 1: {ERROR.strip()}"),
        (1, "ERROR: unknown command line flag 'x'\n\n", "exit code 1: ERROR: unknown command line"),
    ],
)
def test_the_line_that_says_why(code: int, log: str, said: str) -> None:
    found = end_in_words(code, log)
    assert found.startswith(said)
    assert "Local segment" not in found
