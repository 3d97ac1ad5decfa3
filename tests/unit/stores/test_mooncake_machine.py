"""What is said before Mooncake is asked, and what its status codes become."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagetap.errors import Refused
from stagetap.stores import mooncake_client
from stagetap.stores.mooncake_client import Role, check_machine
from stagetap.stores.mooncake_status import MasterUnreachable, failure
from stagetap.stores.mooncake_uri import parse_uri


@pytest.mark.parametrize(
    ("role", "options", "named"),
    [
        ("writer", "global_segment_size=400TiB", "global_segment_size: 439804651110400 bytes"),
        ("reader", "local_buffer_size=400TiB", "local_buffer_size: 439804651110400 bytes"),
        # 192.0.2.0/24 is for documentation (RFC 5737), and no name ends in .invalid (RFC 2606).
        ("writer", "host=192.0.2.7", "option host: 192.0.2.7 is no address of this host"),
        ("writer", "host=nosuch.invalid", "option host: nosuch.invalid is no address of this"),
        ("reader", "protocol=rdma", "protocol=rdma: this machine has no RDMA device"),
    ],
)
def test_what_the_machine_has_not_is_refused(
    role: Role, options: str, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mooncake_client, "_RDMA_DEVICES", tmp_path)
    with pytest.raises(Refused, match=named):
        check_machine(parse_uri(f"mooncake://host:1/r?{options}"), role)


def test_a_reader_lends_nothing() -> None:
    check_machine(
        parse_uri("mooncake://host:1/r?global_segment_size=400TiB&host=192.0.2.7"), "reader"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_of_this_host_may_be_lent_under(host: str) -> None:
    check_machine(parse_uri(f"mooncake://host:1/r?host={host}"), "writer")


@pytest.mark.parametrize(("code", "cure"), [(-900, "`stagetap store up`"), (-901, "rpc_timeout")])
def test_a_master_that_is_silent_has_a_cure(code: int, cure: str) -> None:
    error = failure("get", "k", code)
    assert isinstance(error, MasterUnreachable)
    assert cure in str(error)
    assert f"status {code}" in str(error)
