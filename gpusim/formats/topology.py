"""The topology document: GPUs, nodes, the links between them, and measured times of collectives.

A bundled topology has the name of its GPU's hardware model, for example `h200`. A GPU without one gets `fallback`:
eight GPUs of its kind on PCIe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from gpusim.errors import TopologyError
from gpusim.formats.hardware import HardwareModel, Rate, TimeNs
from gpusim.io import file_limits
from gpusim.io.files import Count, Document, Positive, read_document
from gpusim.io.opening import bundled_or_file
from gpusim.io.resources import resource_dir
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.units import counted

SCHEMA: Final = "gpusim-topology/1"

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Sync = Literal["all_reduce", "parameter_server"]
Nodes = Annotated[int, Meta(ge=1, le=file_limits.MAX_NODES)]
NodeGpus = Annotated[int, Meta(ge=1, le=file_limits.MAX_NODE_GPUS)]
Group = Annotated[int, Meta(ge=2, le=file_limits.MAX_NODE_GPUS)]
Points = Annotated[tuple[tuple[Positive, Positive], ...], Meta(min_length=1, max_length=file_limits.MAX_CURVE_POINTS)]


class Link(Document, frozen=True, kw_only=True):
    """Link of a GPU (`node`) or of a node (`network`)."""

    bytes_per_ns: Rate
    """Bandwidth per direction, as collectives reach it."""
    latency_ns: TimeNs
    """Fixed time of a transfer."""
    source: str
    """Source."""


class Links(Document, frozen=True, kw_only=True):
    """Links of a topology; an omitted link does not exist."""

    node: Link | None = None
    """Link of each GPU within a node."""
    network: Link | None = None
    """Link of each node."""


class Curve(Document, frozen=True, kw_only=True):
    """Measured times of a collective within one node."""

    collective: Collective
    """Collective."""
    gpus: Group
    """Number of GPUs."""
    points: Points
    """Bytes of a GPU's buffer and ns, ascending. The buffer is the summed array, the whole array after an all-gather
    or before a reduce-scatter, or what a GPU sends in an all-to-all."""
    source: str
    """Source."""


class Topology(Document, frozen=True, kw_only=True):
    """Several GPUs of one kind and the links between them."""

    schema: Literal["gpusim-topology/1"]
    """`gpusim-topology/1`."""
    name: str
    """File name without `.json`."""
    hardware: str
    """Hardware model of the GPUs."""
    nodes: Nodes
    """Number of nodes."""
    gpus_per_node: NodeGpus
    """GPUs per node."""
    links: Links
    """Links between GPUs and between nodes."""
    curves: tuple[Curve, ...] = ()
    """Measured collectives; if empty, times follow from links."""
    collective_sms: Count = 0
    """SMs that a collective occupies."""
    collective_sms_source: str = ""
    """Source."""
    dram_per_wire_byte: Annotated[float, Meta(ge=0, le=16)] = 0.0
    """DRAM traffic per byte on a GPU's link."""
    dram_per_wire_byte_source: str = ""
    """Source."""
    sync: Sync = "all_reduce"
    """Method of summing gradients."""

    @property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def measured(self) -> bool:
        """True if any collective was measured."""
        return bool(self.curves)

    def __repr__(self) -> str:
        return short_repr("Topology", f"{short_name(self.name)}: {self.nodes} x {counted(self.gpus_per_node, 'GPU')}")

    def _repr_html_(self) -> str:
        rows = [
            ("nodes", f"{self.nodes} of {counted(self.gpus_per_node, 'GPU')}"),
            *(
                (name, f"{link.bytes_per_ns:g} GB/s, {link.latency_ns / 1e3:g} us" if link else "none")
                for name, link in (("link of a GPU", self.links.node), ("link of a node", self.links.network))
            ),
            ("measured", ", ".join(f"{curve.collective} of {curve.gpus}" for curve in self.curves) or "nothing"),
        ]
        return html_table(f"Topology {self.name}", ("", ""), rows)


def read_topology(path: Path) -> Topology:
    """Read and check a topology. Raises `TopologyError` with file, place and reason."""
    topology = read_document(path, Topology, SCHEMA, TopologyError)
    seen: dict[tuple[str, int], int] = {}
    for place, curve in enumerate(topology.curves):
        sizes = [size for size, _ in curve.points]
        if sizes != sorted(set(sizes)):
            raise TopologyError(str(path), "bytes do not ascend", place=f"$.curves[{place}].points")
        if curve.gpus > topology.gpus_per_node:
            problem = f"{curve.gpus} GPUs, of nodes of {topology.gpus_per_node}"
            raise TopologyError(str(path), problem, place=f"$.curves[{place}].gpus")
        earlier = seen.setdefault((curve.collective, curve.gpus), place)
        if earlier != place:
            problem = f"{curve.collective} of {curve.gpus} GPUs is $.curves[{earlier}], too"
            raise TopologyError(str(path), problem, place=f"$.curves[{place}]")
    numbers = (
        ("collective_sms", topology.collective_sms, topology.collective_sms_source),
        ("dram_per_wire_byte", topology.dram_per_wire_byte, topology.dram_per_wire_byte_source),
    )
    for name, value, source in numbers:
        if value and not source.strip():
            raise TopologyError(str(path), "has no source", place=f"$.{name}")
    return topology


def bundled_topologies() -> dict[str, Path]:
    """Return the file of each bundled topology, by name."""
    return {path.stem: path for path in sorted(resource_dir("topologies").glob("*.json"))}


def load_topology(name_or_file: str) -> Topology:
    """Load a topology by bundled name or file name (`.json`). Raises `TopologyError`, `UnknownNameError`."""
    return read_topology(bundled_or_file("topology", name_or_file, bundled_topologies(), ".json"))


def default_topology(hardware: HardwareModel) -> Topology:
    """Return the bundled topology of a GPU, or `fallback`."""
    bundled = bundled_topologies()
    return read_topology(bundled[hardware.name]) if hardware.name in bundled else fallback(hardware)


#: Cloud hosts have eight GPUs.
_FALLBACK_GPUS: Final = 8


def fallback(hardware: HardwareModel) -> Topology:
    """Return eight GPUs of one host on PCIe, with the bandwidth of copies to the host; no link is measured."""
    rate = min(hardware.copies.h2d_bytes_per_ns, hardware.copies.d2h_bytes_per_ns)
    source = f"copies to the host of hardware model {hardware.name}; not measured between GPUs"
    return Topology(
        schema=SCHEMA,
        name=f"{hardware.name}-pcie",
        hardware=hardware.name,
        nodes=1,
        gpus_per_node=_FALLBACK_GPUS,
        links=Links(node=Link(bytes_per_ns=rate, latency_ns=hardware.copies.latency_ns, source=source)),
    )


def check_gpus(topology: Topology, gpus: int, source: str = "") -> None:
    """Raise `TopologyError` if the topology has fewer GPUs, or lacks a link between them."""
    where = source or topology.name
    if gpus > topology.gpus:
        have = f"{topology.nodes} x {topology.gpus_per_node} = {counted(topology.gpus, 'GPU')}"
        raise TopologyError(where, f"has {have}, and {gpus} are asked for", place="$.nodes")
    if gpus > 1 and topology.gpus_per_node > 1 and topology.links.node is None:
        raise TopologyError(where, "has no link between the GPUs of a node", place="$.links.node")
    if gpus > topology.gpus_per_node and topology.links.network is None:
        problem = f"has no link between nodes, which {gpus} GPUs on nodes of {topology.gpus_per_node} need"
        raise TopologyError(where, problem, place="$.links.network")


def check_collective_sms(topology: Topology, hardware: HardwareModel, source: str = "") -> None:
    """Raise `TopologyError` if collectives take more SMs than the GPU has."""
    sms = hardware.limits.sms
    if topology.collective_sms > sms:
        problem = f"{topology.collective_sms} SMs, and {hardware.name} has {sms}"
        raise TopologyError(source or topology.name, problem, place="$.collective_sms")
