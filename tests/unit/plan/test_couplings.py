"""Settings that only make sense together: each rule, on its edge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagetap.findings import Finding
from stagetap.plan.couplings import (
    Expected,
    Served,
    check_draft,
    check_hosts,
    check_memory,
    check_times,
)
from stagetap.stores.mooncake_uri import parse_uri

SERVED = Served(
    layer_ids=(2, 15, 27, 30),
    num_hidden_layers=30,
    token_bytes=4616,
    max_len=1024,
    max_num_seqs=8,
    workers=2,
    hosts=1,
    publish_timeout_s=120.0,
)
IN_FLIGHT_BYTES = 8 * 1024 * 4616


def store(options: str) -> object:
    return parse_uri(f"mooncake://10.0.0.1:50051/run?{options}")


def only(findings: object) -> Finding:
    (finding,) = findings  # type: ignore[misc]
    return finding


def found(findings: object, check: str) -> Finding:
    return only(each for each in findings if each.check == check)  # type: ignore[attr-defined]


# A draft ---------------------------------------------------------------------------------------


def test_a_draft_that_reads_what_is_captured() -> None:
    assert only(check_draft(SERVED, (2, 15, 27), "draft")).ok


@pytest.mark.parametrize(
    ("draft", "named", "cure"),
    [
        ((2, 14, 27), "14 of these", "capture 2,14,27,30"),
        ((15, 2, 27), "holds 2,15,27", "capture 15,2,27,30"),
        ((2, 27), "holds 2,15,27", "capture 2,27,30"),
        ((2, 15, 27, 28), "28 of these", "capture 2,15,27,28,30"),
    ],
)
def test_a_draft_that_would_be_fed_something_else(
    draft: tuple[int, ...], named: str, cure: str
) -> None:
    finding = only(check_draft(SERVED, draft, "draft"))
    assert named in finding.found
    assert finding.cure == cure


def test_a_draft_that_reads_the_last_layer_needs_it_captured() -> None:
    assert only(check_draft(SERVED, (2, 15, 27, 30), "draft")).ok
    without = replace(SERVED, layer_ids=(2, 15, 27))
    assert only(check_draft(without, (2, 15, 27, 30), "draft")).cure == "capture 2,15,27,30"
    assert only(check_draft(without, (2, 15), "draft")).cure == "capture 2,15"


# Memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spare", "ok"), [(0, True), (-1, False)])
def test_what_workers_lend_must_hold_what_is_in_flight(spare: int, ok: bool) -> None:
    each = IN_FLIGHT_BYTES // 2 + spare
    finding = only(check_memory(SERVED, store(f"global_segment_size={each}"), Expected()))
    assert finding.ok is ok
    if not ok:
        assert f"global_segment_size={IN_FLIGHT_BYTES // 2}," in str(finding.cure)
        assert "--max-num-seqs 7" in str(finding.cure)


@pytest.mark.parametrize(("lent", "ok"), [(IN_FLIGHT_BYTES, True), (IN_FLIGHT_BYTES - 1, False)])
def test_what_others_lend_counts(lent: int, ok: bool) -> None:
    expected = Expected(lent_bytes=lent)
    finding = only(check_memory(SERVED, store("global_segment_size=0"), expected))
    assert finding.ok is ok
    if not ok:  # nothing that would let the workers lend, and samples go with them
        assert f"store up --lend {IN_FLIGHT_BYTES}, or" in str(finding.cure)


def test_copies_count() -> None:
    lent = Expected(lent_bytes=2 * IN_FLIGHT_BYTES - 1)
    options = store("global_segment_size=0&replicas=2")
    assert not only(check_memory(SERVED, options, lent)).ok


def test_memory_that_nobody_lends() -> None:
    finding = only(check_memory(SERVED, store("global_segment_size=0"), Expected()))
    assert "--lent" in str(finding.cure)


def test_tokens_in_flight_can_be_said_but_never_less_than_a_sequence() -> None:
    options = store("global_segment_size=0")
    one_sequence = 1024 * 4616
    few = Expected(tokens_in_flight=10, lent_bytes=one_sequence)
    assert only(check_memory(SERVED, options, few)).ok
    assert not only(check_memory(SERVED, options, replace(few, lent_bytes=one_sequence - 1))).ok
    many = Expected(tokens_in_flight=10_000, lent_bytes=IN_FLIGHT_BYTES)
    assert not only(check_memory(SERVED, options, many)).ok


def test_what_nothing_bounds_is_a_problem() -> None:
    for unbounded in (replace(SERVED, max_num_seqs=None), replace(SERVED, max_len=None)):
        finding = only(check_memory(unbounded, store(""), Expected()))
        assert "max-num-seqs" in str(finding.cure)


def test_a_model_that_is_elsewhere_is_said() -> None:
    finding = only(check_memory(replace(SERVED, token_bytes=None), store(""), Expected()))
    assert finding.ok
    assert "not told" in finding.found


# Times -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "lease_s", "ok"),
    [
        ("", 10, True),
        ("lease_wait=10", 10, False),
        ("lease_wait=10&force_remove=on", 10, True),
        ("lease_wait=15", 20, False),
    ],
)
def test_a_removal_outlasts_the_lease_of_its_own_read(
    options: str, lease_s: float, ok: bool
) -> None:
    findings = check_times(SERVED, store(options), Expected(lease_s=lease_s))
    assert found(findings, "lease and removal").ok is ok


@pytest.mark.parametrize(
    ("options", "consume_s", "cure"),
    [
        ("space_wait=30", 30, None),
        ("space_wait=29", 30, "space_wait to at least 30"),
        ("hard_pin=off&soft_pin=30", 30, None),
        ("hard_pin=off&soft_pin=29", 30, "soft_pin above 30"),
        ("hard_pin=off", 1, "soft_pin above 1"),
        ("hard_pin=off", None, None),
    ],
)
def test_samples_wait_for_their_consumer(
    options: str, consume_s: float | None, cure: str | None
) -> None:
    findings = check_times(SERVED, store(options), Expected(consume_s=consume_s))
    finding = found(findings, "time until consumed")
    assert finding.ok is (cure is None)
    assert (cure or "") in str(finding.cure)


@pytest.mark.parametrize(("timeout", "ok"), [(60.0, False), (60.1, True)])
def test_a_sample_may_take_as_long_as_its_writes(timeout: float, ok: bool) -> None:
    served = replace(SERVED, publish_timeout_s=timeout)
    assert found(check_times(served, store(""), Expected()), "publishing").ok is ok


# Hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("master", "ok"), [("127.0.0.1", False), ("localhost", False), ("[::1]", False), ("h1", True)]
)
def test_a_master_that_other_hosts_reach(master: str, ok: bool) -> None:
    address = parse_uri(f"mooncake://{master}:50051/run")
    assert not list(check_hosts(SERVED, address))
    assert only(check_hosts(replace(SERVED, hosts=2), address)).ok is ok
