"""A Mooncake address: read, written, and refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetap.errors import Refused
from stagetap.stores.mooncake_uri import (
    LEAST_LENT_BYTES,
    MooncakeOptions,
    format_uri,
    is_mooncake,
    parse_uri,
    with_run,
)

MIB = 1024**2


def test_an_address_alone_has_all_defaults() -> None:
    assert parse_uri("mooncake://localhost:50051") == MooncakeOptions(master="localhost:50051")
    options = parse_uri("mooncake://10.0.0.1:50051/run-1")
    assert (options.master, options.run) == ("10.0.0.1:50051", "run-1")
    assert options.hard_pin, "what is committed is not evicted unless somebody says so"


def test_every_option_is_read() -> None:
    options = parse_uri(
        "mooncake://[::1]:1/a%2Fb?protocol=rdma&device_names=mlx5_0,mlx5_1"
        "&metadata_server=http://m:8080/metadata&host=10.0.0.2&global_segment_size=512MiB"
        "&local_buffer_size=4mib&hard_pin=off&soft_pin=30min&replicas=2&lease_wait=500ms"
        "&force_remove=on&space_wait=0&connect_timeout=2&setup_timeout=3s&put_timeout=4.5"
        "&get_timeout=1h&rpc_timeout=6"
    )
    assert options == MooncakeOptions(
        master="[::1]:1",
        run="a/b",
        protocol="rdma",
        device_names=("mlx5_0", "mlx5_1"),
        metadata_server="http://m:8080/metadata",
        host="10.0.0.2",
        global_segment_size=512 * MIB,
        local_buffer_size=4 * MIB,
        hard_pin=False,
        soft_pin=1800.0,
        replicas=2,
        lease_wait=0.5,
        force_remove=True,
        space_wait=0.0,
        connect_timeout=2.0,
        setup_timeout=3.0,
        put_timeout=4.5,
        get_timeout=3600.0,
        rpc_timeout=6.0,
    )


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("/data", "not a Mooncake address"),
        ("mooncake://", "needs a host and a port"),
        ("mooncake://host", "needs a host and a port"),
        ("mooncake://user@host:1/r", "needs a host and a port"),
        ("mooncake://::1:1/r", "needs a host and a port"),
        ("mooncake://host:0/r", "port '0'"),
        ("mooncake://host:65536/r", "port '65536'"),
        ("mooncake://host:x/r", "port 'x'"),
        ("mooncake://host:1/a/b", "one run, not a path"),
        ("mooncake://host:1/r#x", "write it as %23"),
        ("mooncake://host:1/%ff", "not a valid address"),
        ("mooncake://host:1/r?hard_pin", "not a valid address"),
        ("mooncake://host:1/r?protocl=tcp", "unknown option 'protocl'; known are protocol,"),
        ("mooncake://host:1/r?master=x", "unknown option 'master'"),
        ("mooncake://host:1/r?run=x", "unknown option 'run'"),
        ("mooncake://host:1/r?replicas=1&replicas=1", "option replicas is given twice"),
        ("mooncake://host:1/r?protocol=TCP", "option protocol: 'TCP': write tcp or rdma"),
        ("mooncake://host:1/r?global_segment_size=5MB", "option global_segment_size: '5MB'"),
        ("mooncake://host:1/r?global_segment_size=\u0663GiB", "option global_segment_size"),
        ("mooncake://host:1/r?global_segment_size=-1", "option global_segment_size: '-1'"),
        ("mooncake://host:1/r?global_segment_size=99999999TiB", "out of range"),
        ("mooncake://host:1/r?global_segment_size=16777215", "Mooncake lends 16MiB at least"),
        ("mooncake://host:1/r?local_buffer_size=1KiB", "local_buffer_size: 1KiB is out of range"),
        ("mooncake://host:1/r?hard_pin=yes", "option hard_pin: 'yes': write on or off"),
        ("mooncake://host:1/r?hard_pin=true", "option hard_pin: 'true': write on or off"),
        ("mooncake://host:1/r?soft_pin=30", "soft_pin needs hard_pin=off"),
        ("mooncake://host:1/r?replicas=0", "option replicas: '0'"),
        ("mooncake://host:1/r?replicas=two", "option replicas: 'two'"),
        ("mooncake://host:1/r?put_timeout=0", "option put_timeout: a timeout of nothing"),
        ("mooncake://host:1/r?put_timeout=soon", "option put_timeout: 'soon' is no time"),
        ("mooncake://host:1/r?lease_wait=-1", "option lease_wait: '-1' is no time"),
        ("mooncake://host:1/r?device_names=mlx5_0", "device_names needs protocol=rdma"),
        ("mooncake://host:1/r?device_names=a,&protocol=rdma", "option device_names"),
        ("mooncake://host:1/r?host=", "option host"),
        ("mooncake://host:1/%zz", "write it as %25"),
        ("mooncake://host:1/r?host=a%2", "write it as %25"),
        ("mooncake://host:1/r?replicas=4294967296", "give a number from 1 to 1024"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(uri: str, named: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_uri(uri)
    assert named in str(refused.value)
    assert uri in str(refused.value)


@pytest.mark.parametrize("space", ["\n", "\t", " ", "\u2028"])
def test_an_address_with_a_space_is_refused_and_not_read_without_it(space: str) -> None:
    for uri in (f"mooncake://host:1/r{space}", f"mooncake://ho{space}st:1/r"):
        with pytest.raises(Refused, match="a space or line end") as refused:
            parse_uri(uri)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("mooncake://host:{}/r", "port .* give a number from 1 to 65535"),
        ("mooncake://host:1/r?replicas={}", "option replicas: .* give a number from 1 to 1024"),
        ("mooncake://host:1/r?global_segment_size={}", "global_segment_size: .* out of range"),
        ("mooncake://host:1/r?put_timeout={}", "option put_timeout: .* out of range"),
    ],
)
def test_more_digits_than_python_reads_are_refused_by_name(uri: str, says: str) -> None:
    with pytest.raises(Refused, match=says):
        parse_uri(uri.format("9" * 5000))


def test_the_run_has_one_source_of_truth() -> None:
    options = parse_uri("mooncake://host:1")
    assert with_run(options, "a").run == "a"
    assert with_run(with_run(options, "a"), "a").run == "a"
    with pytest.raises(Refused, match="names run 'a' and run_id is 'b'"):
        with_run(with_run(options, "a"), "b")


def test_the_page_lists_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs/mooncake.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", page, re.MULTILINE))
    fields = msgspec.structs.fields(MooncakeOptions)
    assert list(rows) == [each.name for each in fields if each.name not in ("master", "run")]
    for name, default in rows.items():
        if default not in ("none", "found out"):
            said = parse_uri(f"mooncake://host:1?{name}={default}")
            assert getattr(said, name) == getattr(parse_uri("mooncake://host:1"), name), name


def test_schemes() -> None:
    assert is_mooncake("mooncake://host:1")
    assert not is_mooncake("mooncake")
    assert not is_mooncake("file:///mooncake://")


@given(
    run=st.none() | st.text(min_size=1).filter(lambda text: text.isprintable()),
    size=st.just(0) | st.integers(LEAST_LENT_BYTES, 2**60),
    pin=st.booleans(),
    replicas=st.integers(1, 9),
    seconds=st.floats(1e-9, 1e9),
)
def test_an_address_that_is_written_reads_the_same(
    run: str | None, size: int, pin: bool, replicas: int, seconds: float
) -> None:
    options = MooncakeOptions(
        master="host:1",
        run=run,
        global_segment_size=size,
        hard_pin=pin,
        replicas=replicas,
        put_timeout=seconds,
        lease_wait=seconds,
    )
    assert parse_uri(format_uri(options)) == options
