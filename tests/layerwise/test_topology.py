"""Topologies: links, measured curves, and times of collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.errors import TopologyError, UnknownNameError
from gpusim.formats.hardware import bundled_hardware, load_hardware
from gpusim.formats.topology import (
    Curve,
    Topology,
    bundled_topologies,
    check_collective_sms,
    check_gpus,
    default_topology,
    load_topology,
    read_topology,
)
from gpusim.layerwise.communication import Members, basis, interpolate, members, regular, sync_ns, time_ns

MIB = 1 << 20


def document(**changes: Any) -> dict[str, Any]:
    """Make a topology of 2 x 4 GPUs whose links take 1 byte per ns and 100 ns."""
    link = {"bytes_per_ns": 1.0, "latency_ns": 100.0, "source": "made up"}
    base = {
        "schema": "gpusim-topology/1",
        "name": "made",
        "hardware": "h200",
        "nodes": 2,
        "gpus_per_node": 4,
        "links": {"node": link, "network": {**link, "bytes_per_ns": 0.5, "latency_ns": 1000.0}},
    }
    return {**base, **changes}


def topology(**changes: Any) -> Topology:
    return msgspec.convert(document(**changes), Topology)


def test_every_bundled_topology_is_of_a_bundled_gpu() -> None:
    for name in bundled_topologies():
        assert load_topology(name).hardware in bundled_hardware()


def test_every_bundled_gpu_has_a_topology_or_a_fallback_that_says_so() -> None:
    for name in bundled_hardware():
        found = default_topology(load_hardware(name))
        assert found.links.node is not None
        assert name in bundled_topologies() or "not measured" in found.links.node.source


def test_without_curves_a_ring_takes_its_steps_and_its_bytes() -> None:
    """4 GPUs: 6 steps of 100 ns, and 2 x 3/4 of 1,000 bytes at 1 byte a ns."""
    assert time_ns(topology(), "all_reduce", 1000.0, Members(4, 4)) == 6 * 100 + 1500
    assert time_ns(topology(), "all_gather", 1000.0, Members(4, 4)) == 3 * 100 + 750
    assert time_ns(topology(), "all_to_all", 1000.0, Members(4, 4)) == 100 + 750
    assert basis(topology(), "all_reduce", Members(4, 4)) == "links"


def test_between_nodes_the_network_is_added_and_shared_by_what_crosses_it_at_once() -> None:
    """8 GPUs of 2 nodes: the ring of 4 within, then 1,000 bytes over 0.5 bytes a ns and two latencies."""
    inside = time_ns(topology(), "all_reduce", 1000.0, Members(4, 4))
    assert time_ns(topology(), "all_reduce", 1000.0, members(range(8), 4)) == inside + 1000 / 0.5 + 2 * 1000
    two = members(range(0, 8, 2), 4, at_once=2)
    assert two == Members(4, 2, 2, 2)
    inside = time_ns(topology(), "all_reduce", 1000.0, Members(2, 2))
    assert time_ns(topology(), "all_reduce", 1000.0, two) == inside + 2000 / 0.5 + 2 * 1000


def test_no_more_collectives_share_a_node_than_it_has_gpus() -> None:
    """16 parts of the channels on nodes of 4: each node has GPUs of 4 of them."""
    assert members(range(0, 64, 16), 4, at_once=16) == Members(4, 1, 4, 4)


def test_one_gpu_and_nothing_to_move_take_no_time() -> None:
    assert time_ns(topology(), "all_reduce", 1000.0, Members(1, 1)) == 0
    assert time_ns(topology(), "all_reduce", 0.0, Members(4, 4)) == 0


def curve(*points: tuple[int, int], gpus: int = 4) -> Curve:
    return Curve(collective="all_reduce", gpus=gpus, points=points, source="made up")


def test_a_curve_is_read_in_the_logarithm_of_size() -> None:
    """Half way between 1 and 4 MiB in powers of two is 2 MiB: the geometric mean of 10 and 40 us."""
    found = curve((MIB, 10_000), (4 * MIB, 40_000))
    assert interpolate(found, 2 * MIB) == pytest.approx(20_000)
    assert interpolate(found, 100) == 10_000, "no faster than the smallest"
    assert interpolate(found, 8 * MIB) == pytest.approx(80_000), "beyond, at the largest one's bandwidth"


def test_noise_of_a_curve_makes_no_larger_message_faster_and_no_byte_dearer() -> None:
    found = regular(((MIB, 10_000), (2 * MIB, 9_000), (4 * MIB, 90_000)))
    assert found == ((MIB, 10_000.0), (2 * MIB, 10_000.0), (4 * MIB, 20_000.0))


def test_a_curve_of_other_gpus_is_read_at_as_many_bytes_on_the_wire() -> None:
    """2 GPUs from 4: 1.5 times fewer bytes on a link, and 4 steps of 100 ns fewer."""
    links = topology(curves=[msgspec.to_builtins(curve((MIB, 10_000), (4 * MIB, 40_000)))])
    size = 1.5 * 2 * MIB
    assert time_ns(links, "all_reduce", size, Members(2, 2)) == pytest.approx(20_000 - 4 * 100)
    assert basis(links, "all_reduce", Members(2, 2)) == "scaled"
    assert basis(links, "all_reduce", Members(4, 4)) == "measured"


def test_a_parameter_server_takes_one_gradient_after_another() -> None:
    """4 GPUs of a node: three gradients over its link; 2 nodes: one more over the network."""
    server = topology(sync="parameter_server")
    assert sync_ns(server, 1000.0, Members(4, 4)) == 3 * 1000 + 100
    assert sync_ns(server, 1000.0, members(range(8), 4)) == 3 * 1000 + 100 + 1000 / 0.5 + 1000


@pytest.mark.parametrize(
    ("changes", "gpus", "words"),
    [
        ({}, 9, r"2 x 4 = 8 GPUs, and 9 are asked for"),
        ({"links": {"node": document()["links"]["node"]}}, 8, "no link between nodes"),
        ({"links": {"network": document()["links"]["network"]}}, 2, "no link between the GPUs of a node"),
    ],
)
def test_too_many_gpus_and_missing_links_are_one_line_with_the_place(changes: dict, gpus: int, words: str) -> None:
    with pytest.raises(TopologyError, match=words) as error:
        check_gpus(topology(**changes), gpus, "links.json")
    assert str(error.value).startswith("links.json: $.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 0}, r"\$.nodes"),
        ({"links": {"node": {"bytes_per_ns": -1, "latency_ns": 0, "source": ""}}}, r"\$.links.node.bytes_per_ns"),
        ({"curves": [{"collective": "gossip", "gpus": 2, "points": [[1, 1]], "source": ""}]}, "gossip"),
        (
            {"curves": [{"collective": "all_reduce", "gpus": 2, "points": [[2, 1], [1, 1]], "source": ""}]},
            "do not ascend",
        ),
        (
            {"curves": [{"collective": "all_reduce", "gpus": 8, "points": [[1, 1]], "source": ""}]},
            "8 GPUs, of nodes of 4",
        ),
        (
            {"curves": [{"collective": "all_reduce", "gpus": 2, "points": [[1, 1]], "source": ""}] * 2},
            r"\$.curves\[1\]: all_reduce of 2 GPUs is \$.curves\[0\], too",
        ),
        ({"collective_sms": 24}, "has no source"),
        ({"sync": "gossip"}, r"\$.sync"),
        ({"schema": "gpusim-topology/9"}, "gpusim-topology/9"),
    ],
)
def test_a_broken_topology_is_refused_with_file_and_place(tmp_path: Path, changes: dict, words: str) -> None:
    file = tmp_path / "links.json"
    file.write_text(json.dumps(document(**changes)))
    with pytest.raises(TopologyError, match=words) as error:
        read_topology(file)
    assert str(file) in str(error.value)


def test_an_unknown_topology_names_those_that_there_are() -> None:
    with pytest.raises(UnknownNameError, match="h200"):
        load_topology("h2000")


def test_name_that_no_file_can_have_is_unknown() -> None:
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(UnknownNameError, match="unknown topology"):
            load_topology(name)


def test_collectives_on_more_sms_than_the_gpu_has_are_refused() -> None:
    """An H200 has 132."""
    hardware = load_hardware("h200")
    check_collective_sms(topology(collective_sms=132, collective_sms_source="x"), hardware)
    with pytest.raises(TopologyError, match=r"links\.json: \$\.collective_sms: 133 SMs, and h200 has 132"):
        check_collective_sms(topology(collective_sms=133, collective_sms_source="x"), hardware, "links.json")
