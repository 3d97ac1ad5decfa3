"""Whether Mooncake can be had here, for tests that need it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

import pytest

from stagetap.errors import Refused
from stagetap.stores.mooncake_package import load_mooncake, tell_library

# As set-up asks, but an index that cannot be fetched is an error.
_UPDATE = (
    *("apt-get", "-qq", "-o", "APT::Update::Error-Mode=any"),
    *("-o", "DPkg::Lock::Timeout=60", "-o", "Acquire::http::Timeout=10"),
    *("-o", "Acquire::Retries=1", "update"),
)


def require_mooncake(rpc_seconds: float = 10) -> None:
    """Skip where Mooncake cannot be loaded, with the cure as the reason.

    Set-up installs what Mooncake loads where it can: as root, with apt and its network. There CI
    fails, as a skip would go unnoticed.
    """
    tell_library(rpc_seconds, "127.0.0.1")
    reason = _why_not()
    if reason is None:
        return
    if is_ci_as_root():
        why_no_cure = _why_nothing_can_be_installed()
        if why_no_cure is None:
            pytest.fail(f"CI has to run this, and set-up could have installed it: {reason}")
        reason = f"{reason} ({why_no_cure})"
    pytest.skip(reason)


def is_ci_as_root() -> bool:
    """Whether skipping what root may do would hide something."""
    return os.environ.get("CI") == "true" and os.geteuid() == 0


@functools.cache
def _why_not() -> str | None:
    try:
        load_mooncake()
    except Refused as refused:
        return str(refused)
    return None


@functools.cache
def _why_nothing_can_be_installed() -> str | None:
    if shutil.which("apt-get") is None:
        return "and there is no apt-get here"
    if subprocess.run(_UPDATE, capture_output=True).returncode != 0:
        return "and apt-get update reaches no network from here"
    return None
