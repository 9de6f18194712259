"""Hardware models: every bundled document is valid, names its sources, and matches NVIDIA's own occupancy."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.errors import HardwareError, PlanError, UnknownNameError
from gpusim.formats.hardware import (
    Contention,
    GraphCosts,
    HardwareModel,
    Limits,
    Measure,
    StreamCosts,
    _read_once,
    bundled_hardware,
    hardware_for_gpu,
    load_hardware,
    measure_of,
    read_hardware,
)
from gpusim.formats.trace import Kernel
from gpusim.plan.graph import OpGraph
from gpusim.rules.occupancy import (
    NO_DEMAND,
    Demand,
    kernel_demand,
    kernel_occupancy,
    occupancy,
    smem_footprint,
)
from gpusim.trace.store import load_trace

NAMES = ("a100-80gb", "h100-sxm", "h200", "k40", "p100", "rtx4090", "v100")
SECTIONS = ("limits", "memory", "rates", "copies", "graph", "stream", "contention", "uncertainty")
MODELS = {name: load_hardware(name) for name in NAMES}
FIELDS = [(section, field) for section in SECTIONS for field in getattr(MODELS["v100"], section).__struct_fields__]
#: Value of each number that a file may leave out.
DEFAULTS = {
    (section, field.name): field.default
    for section in SECTIONS
    for field in msgspec.structs.fields(getattr(MODELS["v100"], section))
}
REPOSITORY = Path(__file__).parents[2]


def document(name: str = "v100") -> dict[str, Any]:
    """Return a bundled model as plain JSON values, free to be changed."""
    found: dict[str, Any] = json.loads(bundled_hardware()[name].read_text())
    return found


def written(folder: Path, changed: dict[str, Any]) -> Path:
    """Write a file with this document."""
    path = folder / "changed.json"
    path.write_text(json.dumps(changed))
    return path


def kernel(threads: int = 256, regs: int = 32, smem: int = 0, blocks: int = 1) -> Kernel:
    """A kernel with a one-dimensional grid and block."""
    return Kernel(
        name="some_kernel",
        dur_ns=1000,
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        regs_per_thread=regs,
        smem_bytes=smem,
    )


# --- documents ---------------------------------------------------------------------------------------------------


def test_bundled_models_are_those_documented() -> None:
    """The documented list of GPUs reveals a lost or misnamed file."""
    assert set(NAMES) <= set(bundled_hardware())
    assert list(bundled_hardware()) == sorted(bundled_hardware())


@pytest.mark.parametrize("section", [GraphCosts, StreamCosts, Contention])
def test_every_number_of_a_rule_says_whether_it_is_a_time_a_count_an_exponent_or_a_ratio(section: Any) -> None:
    measures = measure_of(section)
    assert tuple(measures) == section.__struct_fields__
    assert set(measures.values()) <= set(get_args(Measure))
    assert {name for name, measure in measures.items() if measure == "time"} == {
        name for name in section.__struct_fields__ if name.endswith("_ns")
    }


def test_a_number_that_does_not_say_what_it_measures_is_refused() -> None:
    class Untagged(msgspec.Struct):
        gap_ns: float

    with pytest.raises(TypeError, match=r"Untagged\.gap_ns"):
        measure_of(Untagged)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(bundled_hardware()))
def test_bundled_model_reads_and_is_named_as_its_file(name: str) -> None:
    """Every bundled model is valid, and is found by its name."""
    model = load_hardware(name)
    assert model.name == name
    assert model.limits.smem_per_block_bytes + model.limits.smem_reserved_bytes <= model.limits.smem_per_sm_bytes
    assert model.limits.threads_per_sm % model.limits.warp_threads == 0
    assert all(text.strip() for text in model.sources.values())


@pytest.mark.parametrize("name", sorted(bundled_hardware()))
def test_sources_name_only_sections_and_fields_that_exist(name: str) -> None:
    """A source for a misspelt or removed field would be meaningless."""
    known = {*SECTIONS, *(f"{section}.{field}" for section, field in FIELDS)}
    assert set(load_hardware(name).sources) <= known


@pytest.mark.parametrize(("section", "field"), FIELDS, ids=[f"{s}.{f}" for s, f in FIELDS])
def test_number_without_a_source_is_refused(tmp_path: Path, section: str, field: str) -> None:
    """Every number has a source: taking one away is an error that names the number."""
    changed = document()
    if changed[section].get(field, DEFAULTS[section, field]) == DEFAULTS[section, field]:
        changed[section][field] = 0.5  # one that older files leave out, or its value without it
    changed["sources"] = {f"{s}.{f}": "somewhere" for s, f in FIELDS if (s, f) != (section, field)}
    with pytest.raises(HardwareError, match="has no source") as caught:
        read_hardware(written(tmp_path, changed))
    assert caught.value.place == f"$.{section}.{field}"


def test_number_that_an_older_file_leaves_out_needs_no_source(tmp_path: Path) -> None:
    """A file from before a constant existed reads as before, and compares with current ones."""
    older = document("h200")
    del older["graph"]["busy_ns"], older["sources"]["graph.busy_ns"]
    assert read_hardware(written(tmp_path, older)).graph.busy_ns == 0.0


@pytest.mark.parametrize("field", ["cache_frac", "products_frac"])
def test_number_that_no_rule_uses_any_more_is_read_and_changes_no_interval(tmp_path: Path, field: str) -> None:
    older = document("h200")
    older["uncertainty"][field] = 0.12
    older["sources"][f"uncertainty.{field}"] = "replayed schedules"
    read = read_hardware(written(tmp_path, older))
    assert getattr(read.uncertainty, field) == 0.12
    assert read.interval_ns(1000, 1500, 2, less_known=True) == MODELS["h200"].interval_ns(
        1000, 1500, 2, less_known=True
    )


def test_source_of_a_section_covers_its_fields(tmp_path: Path) -> None:
    """A source may be given once for a section."""
    changed = document()
    changed["sources"] = dict.fromkeys(SECTIONS, "somewhere")
    assert read_hardware(written(tmp_path, changed)).sources["graph"] == "somewhere"


def test_label_of_an_uncalibrated_model_says_so() -> None:
    """Every display of a model shows that its costs were not measured on that GPU."""
    model = MODELS["v100"]
    assert model.label == "v100 (uncalibrated)"
    assert msgspec.structs.replace(model, calibrated=True).label == "v100"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "h200"])
def test_gpus_never_measured_are_uncalibrated(name: str) -> None:
    """An unmeasured GPU claims no calibration, has a wide interval, and names the origin of its costs."""
    model = MODELS[name]
    assert not model.calibrated
    assert model.uncertainty.schedule_frac >= 0.2
    assert "not measured on this GPU" in model.sources["graph"]
    assert "not measured on this GPU" in model.sources["contention"]


def test_unknown_name_suggests_the_nearest() -> None:
    """A misspelt model name gives the nearest and the list."""
    with pytest.raises(UnknownNameError, match=r"unknown hardware 'h20'; did you mean 'h200'\?.*rtx4090"):
        load_hardware("h20")


def test_model_is_found_by_the_drivers_gpu_name() -> None:
    """A trace's GPU finds its model; an unknown GPU finds none."""
    found = hardware_for_gpu("NVIDIA H200")
    assert found is not None
    assert found.name == "h200"
    assert hardware_for_gpu("NVIDIA Nothing 1000") is None


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the hardware models read from here on."""
    paths: list[Path] = []

    def read(path: Path) -> HardwareModel:
        paths.append(path)
        return read_hardware(path)

    monkeypatch.setattr("gpusim.formats.hardware.read_hardware", read)
    _read_once.cache_clear()
    return paths


def test_op_graph_on_the_traces_own_gpu_reads_no_file(files_read: list[Path]) -> None:
    trace, hardware = load_trace("googlenet-infer-b1"), MODELS["h200"]
    OpGraph.build(trace, hardware)
    assert files_read == []


def test_op_graphs_on_another_gpu_read_each_hardware_model_once(files_read: list[Path]) -> None:
    for _ in range(2):
        OpGraph.build(load_trace("googlenet-infer-b1"), MODELS["v100"])
    assert len(files_read) == len(set(files_read)) > 0


def test_hardware_model_that_changed_on_disk_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = document()
    monkeypatch.setattr("gpusim.formats.hardware.resource_dir", lambda name: tmp_path)
    path = written(tmp_path, model | {"gpu": "Old"})
    assert hardware_for_gpu("Old") is not None
    path.write_text(json.dumps(model | {"gpu": "Another"}))
    assert hardware_for_gpu("Old") is None
    assert hardware_for_gpu("Another") is not None


def test_gpu_names_are_distinct() -> None:
    """Two models of one driver name would make `hardware_for_gpu` a matter of file order."""
    names = [read_hardware(path).gpu for path in bundled_hardware().values()]
    assert len(names) == len(set(names))


def broken(section: str, field: str, value: Any) -> str:
    """The v100 document as JSON text with one number replaced."""
    changed = document()
    changed[section][field] = value
    return json.dumps(changed)


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        pytest.param("", "", "is empty", id="empty"),
        pytest.param("{", "", "is not valid JSON", id="truncated"),
        pytest.param("[]", "", "is not a gpusim-hardware/1 document", id="no object"),
        pytest.param(broken("memory", "dram_bytes_per_ns", math.nan), "", "is not valid JSON", id="NaN"),
        pytest.param(broken("memory", "dram_bytes_per_ns", math.inf), "", "is not valid JSON", id="infinity"),
        pytest.param(broken("memory", "dram_bytes_per_ns", 0), "$.memory.dram_bytes_per_ns", "found 0", id="zero rate"),
        pytest.param(broken("memory", "l2_bytes", -5), "$.memory.l2_bytes", "found -5", id="negative size"),
        pytest.param(broken("graph", "chain_ns", -0.5), "$.graph.chain_ns", "found -0.5", id="negative cost"),
        pytest.param(broken("limits", "sms", 0), "$.limits.sms", "found 0", id="no SMs"),
        pytest.param(broken("limits", "sms", 1.5), "$.limits.sms", "found 1.5", id="half an SM"),
        pytest.param(broken("limits", "sms", "80"), "$.limits.sms", "found '80'", id="text for a number"),
        pytest.param(broken("limits", "cores", 5120), "$.limits", "unknown field", id="unknown field"),
        pytest.param(broken("stream", "queues", 33), "$.stream.queues", "33 queues, of at most 32", id="queues"),
        pytest.param(
            json.dumps(document() | {"schema": "gpusim-hardware/2"}), "$.schema", "gpusim-hardware/2", id="version"
        ),
    ],
)
def test_broken_document_is_refused(tmp_path: Path, text: str, place: str, says: str) -> None:
    """A broken model is a `HardwareError` that names file, place and value, never a traceback of ours."""
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(HardwareError) as caught:
        read_hardware(path)
    assert caught.value.file == str(path)
    assert caught.value.place == place
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_number_too_large_for_a_float_is_refused(tmp_path: Path) -> None:
    """1e999 is a `HardwareError`, not infinity."""
    path = tmp_path / "large.json"
    path.write_text(broken("memory", "dram_bytes_per_ns", 12345.5).replace("12345.5", "1e999"))
    with pytest.raises(HardwareError):
        read_hardware(path)


def test_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are a `HardwareError`, anywhere in the file."""
    path = tmp_path / "latin1.json"
    path.write_bytes(json.dumps(document()).encode().replace(b'"v100"', b'"v\xff100"'))
    with pytest.raises(HardwareError):
        read_hardware(path)


def test_empty_source_is_refused(tmp_path: Path) -> None:
    """A blank source counts as missing."""
    changed = document()
    changed["sources"]["limits.sms"] = " "
    with pytest.raises(HardwareError, match="has no source"):
        read_hardware(written(tmp_path, changed))


@pytest.mark.parametrize("field", ["warp_l2_bytes_per_ns", "warp_dram_bytes_per_ns"])
def test_cache_without_the_bandwidth_of_a_warp_is_refused(field: str, tmp_path: Path) -> None:
    """Losses to cache misses divide by it."""
    changed = document()
    changed["memory"] |= {"l2_bytes_per_ns": 8.0, "warp_l2_bytes_per_ns": 1.0, "warp_dram_bytes_per_ns": 1.0}
    changed["sources"] = {f"{section}.{name}": "somewhere" for section, name in FIELDS}
    assert read_hardware(written(tmp_path, changed)).memory.l2_bytes_per_ns == 8.0
    changed["memory"][field] = 0.0
    with pytest.raises(HardwareError, match="is 0, and losses to cache misses need it") as caught:
        read_hardware(written(tmp_path, changed))
    assert caught.value.place == f"$.memory.{field}"


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A model file that does not exist is a `HardwareError` that names it."""
    with pytest.raises(HardwareError, match=r"none\.json: cannot be read"):
        load_hardware(str(tmp_path / "none.json"))


def test_page_describes_every_field() -> None:
    """docs/formats.md has a row for every field of every section."""
    page = (REPOSITORY / "docs" / "formats.md").read_text(encoding="utf-8").split("## Fields of a hardware model")[1]
    assert [f"{section}.{field}" for section, field in FIELDS if f"\n|`{field}`|" not in page] == []


# --- occupancy ---------------------------------------------------------------------------------------------------


def measured_rows() -> list[dict[str, str]]:
    """Return Nsight Compute's launch figures of the kernels of one GoogLeNet inference on an H200."""
    with (Path(__file__).parents[1] / "data" / "occupancy_h200.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_occupancy_agrees_with_nsight_compute() -> None:
    """All four limits of all 220 profiled kernels equal Nsight Compute's report on the H200."""
    rows = measured_rows()
    assert len(rows) == 220
    limits = MODELS["h200"].limits
    for row in rows:
        number = {key: int(value) for key, value in row.items() if key != "kernel"}
        found = occupancy(
            limits,
            number["block_threads"],
            number["regs_per_thread"],
            number["smem_bytes"],
            number["smem_config_bytes"],
        )
        assert (found.by_threads, found.by_regs, found.by_smem, found.by_slots) == (
            number["limit_threads"],
            number["limit_registers"],
            number["limit_smem"],
            number["limit_slots"],
        ), row["kernel"]


@pytest.mark.parametrize(
    ("name", "threads", "regs", "smem", "blocks", "limiter"),
    [
        # 256 threads = 8 warps; 64 warps / 8 = 8 blocks. 32 regs x 32 = 1024 a warp; 4 x (16384 / 1024) = 64 warps.
        pytest.param("h200", 256, 32, 0, 8, "threads", id="threads bind"),
        # 33 threads take 2 whole warps: 64 / 2 = 32 blocks, not 2048 // 33 = 62; the 32 slots allow as many.
        pytest.param("h200", 33, 16, 0, 32, "threads", id="whole warps"),
        # 255 regs x 32 = 8160, rounded up to 8192 a warp; 16384 / 8192 = 2 warps a partition, 8 an SM; 8 / 4 warps = 2.
        pytest.param("h200", 128, 255, 0, 2, "registers", id="registers bind"),
        # 72 regs x 32 = 2304 a warp; 16384 // 2304 = 7 a partition, 28 an SM; 28 // 8 warps = 3.
        pytest.param("h200", 256, 72, 0, 3, "registers", id="four register files, 3.5 blocks"),
        # 80 regs x 32 = 2560 a warp; P100 has two files: 32768 // 2560 = 12 a file, 24 an SM; 24 / 2 warps = 12.
        pytest.param("p100", 64, 80, 0, 12, "registers", id="two register files"),
        # 88 regs x 32 = 2816 a warp; two files: 32768 // 2816 = 11, 22 an SM; 22 // 1 warp = 22.
        pytest.param("p100", 32, 88, 0, 22, "registers", id="two register files, uneven"),
        # The same on V100, four files: 16384 // 2816 = 5 a file, 20 an SM. One file of 65536 would hold 23.
        pytest.param("v100", 32, 88, 0, 20, "registers", id="four register files, uneven"),
        # 48 KB + 1 KB reserved = 50176 = 392 x 128; 233472 // 50176 = 4.
        pytest.param("h200", 128, 32, 48 * 1024, 4, "shared memory", id="reserved shared memory"),
        # A100: 163 KB + 1 KB reserved = 164 KB, all that an SM has.
        pytest.param("a100-80gb", 128, 32, 163 * 1024, 1, "shared memory", id="largest block"),
        # V100 reserves nothing: 98304 // 49152 = 2.
        pytest.param("v100", 128, 32, 48 * 1024, 2, "shared memory", id="nothing reserved"),
        # 2049 bytes are 2304 in steps of 256: 65536 // 2304 = 28, where steps of 128 would give 65536 // 2176 = 30.
        pytest.param("p100", 64, 16, 2049, 28, "shared memory", id="granularity 256"),
        # 32 threads = 1 warp; K40 has 16 slots, though 64 warps fit; 1 byte takes 256: 49152 / 256 = 192 blocks.
        pytest.param("k40", 32, 16, 1, 16, "block slots", id="slots bind"),
        # RTX 4090: 1536 / 1024 = 1 block of 32 warps of the 48; 16 warps stay unused.
        pytest.param("rtx4090", 1024, 32, 0, 1, "threads", id="threads left over"),
        # No shared memory, still 1 KB a block on cc 8.9: 102400 // 1024 = 100, so the 24 slots bind.
        pytest.param("rtx4090", 32, 16, 0, 24, "block slots", id="slots of 8.9"),
        # No registers known (0): they bind nothing. 64 threads = 2 warps; 64 / 2 = 32.
        pytest.param("h200", 64, 0, 0, 32, "threads", id="registers unknown"),
    ],
)
def test_occupancy_by_hand(name: str, threads: int, regs: int, smem: int, blocks: int, limiter: str) -> None:
    """Occupancy of small cases equals the arithmetic in the comment above each."""
    found = kernel_occupancy(MODELS[name].limits, kernel(threads, regs, smem))
    assert (found.blocks, found.limiter) == (blocks, limiter)


@pytest.mark.parametrize(("name", "regs"), [("k40", 16), ("h200", 0)])
def test_limiter_is_never_something_not_asked_for(name: str, regs: int) -> None:
    """A kernel of one warp, without shared memory or known registers, is limited by the block slots alone."""
    assert occupancy(MODELS[name].limits, 32, regs, 0).limiter == "block slots"


def test_carve_out_bounds_shared_memory() -> None:
    """The SM's configured carve-out limits the blocks, not the largest possible one: 32768 // (4096 + 1024) = 6."""
    assert occupancy(MODELS["h200"].limits, 64, 16, 4096, 32768).by_smem == 6
    assert occupancy(MODELS["h200"].limits, 64, 16, 4096).by_smem == 233472 // 5120


def test_demand_by_hand() -> None:
    """A kernel of 66 blocks on 132 SMs: half a block an SM on average.

    256 threads: 0.5 x 256 / 2048 = 1/16. 64 regs: 0.5 x 64 x 256 / 65536 = 1/8. 15 KB + 1 KB: 0.5 x 16384 / 233472.
    Slots 0.5 / 32. By registers an SM holds 4 blocks (by threads 8, by smem 14), so residency is 0.5 / 4.
    """
    found = kernel_demand(MODELS["h200"].limits, kernel(256, 64, 15 * 1024, blocks=66))
    assert found == Demand(
        threads=1 / 16, regs=1 / 8, smem=0.5 * 16384 / 233472, slots=0.5 / 32, residency=0.5 / 4, cover=1.0
    )


def test_demand_stops_at_what_can_be_resident() -> None:
    """A grid of many waves asks for no more than the GPU holds at once."""
    limits = MODELS["h200"].limits
    full = kernel_demand(limits, kernel(256, 32, 0, blocks=132 * 8))
    assert full.residency == full.threads == 1.0
    assert kernel_demand(limits, kernel(256, 32, 0, blocks=10**6)) == full


@pytest.mark.parametrize("kind", ["memset", "memcpy"])
def test_memory_operations_ask_for_no_sm(kind: Any) -> None:
    """Only kernels take SMs."""
    assert kernel_demand(MODELS["h200"].limits, Kernel(name="m", dur_ns=1, kind=kind)) == NO_DEMAND


@pytest.mark.parametrize(
    ("threads", "regs", "smem", "value", "limit"),
    [
        pytest.param(1025, 32, 0, "1025 threads", "1024", id="threads"),
        pytest.param(32, 256, 0, "256 registers", "255", id="registers"),
        pytest.param(32, 32, 98305, "98305 bytes of shared memory", "98304", id="shared memory"),
    ],
)
def test_block_over_a_limit_is_refused(threads: int, regs: int, smem: int, value: str, limit: str) -> None:
    """A block beyond a limit of the GPU is a `PlanError` with value and limit; at the limit it is accepted."""
    limits = MODELS["v100"].limits
    with pytest.raises(PlanError) as caught:
        kernel_occupancy(limits, kernel(threads, regs, smem))
    assert value in str(caught.value)
    assert f"limit is {limit}" in str(caught.value)
    assert kernel_occupancy(limits, kernel(min(threads, 1024), min(regs, 255), min(smem, 98304))).blocks >= 1


def test_block_whose_registers_fit_no_sm_is_refused() -> None:
    """Each value alone is legal, together they are not: 32 warps x 8192 registers are four times an SM's 65536."""
    with pytest.raises(PlanError, match="registers"):
        kernel_occupancy(MODELS["h200"].limits, kernel(1024, 255))


# --- properties --------------------------------------------------------------------------------------------------

gpus = st.sampled_from(sorted(MODELS))
shapes = st.tuples(st.integers(1, 1024), st.integers(0, 255), st.floats(0, 1))
settled = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def legal(limits: Limits, shape: tuple[int, int, float]) -> tuple[int, int, int]:
    """Threads, registers and shared memory of a block that breaks no single limit."""
    threads, regs, share = shape
    return threads, min(regs, limits.regs_per_thread), int(share * limits.smem_per_block_bytes)


@settled
@given(gpus, shapes)
def test_resident_blocks_fit_an_sm(name: str, shape: tuple[int, int, float]) -> None:
    """The blocks an SM holds never take more threads, registers, shared memory or slots than it has."""
    limits = MODELS[name].limits
    threads, regs, smem = legal(limits, shape)
    blocks = occupancy(limits, threads, regs, smem).blocks
    warps = math.ceil(threads / 32)
    assert 0 <= blocks <= limits.blocks_per_sm
    assert blocks * warps * 32 <= limits.threads_per_sm
    assert blocks * warps * 32 * regs <= limits.regs_per_sm
    assert blocks * smem_footprint(limits, smem) <= limits.smem_per_sm_bytes


@settled
@given(gpus, shapes)
def test_one_more_block_would_not_fit(name: str, shape: tuple[int, int, float]) -> None:
    """The number of blocks is the most that fits: one more breaks a limit (registers counted by whole warps a file)."""
    limits = MODELS[name].limits
    threads, regs, smem = legal(limits, shape)
    more = occupancy(limits, threads, regs, smem).blocks + 1
    warps = more * math.ceil(threads / 32)
    per_warp = math.ceil(regs * 32 / limits.reg_granularity) * limits.reg_granularity
    busiest_file = math.ceil(warps / limits.sub_partitions) * per_warp
    assert (
        warps * 32 > limits.threads_per_sm
        or more > limits.blocks_per_sm
        or busiest_file > limits.regs_per_sm // limits.sub_partitions
        or more * smem_footprint(limits, smem) > limits.smem_per_sm_bytes
    )


@settled
@given(gpus, shapes, shapes)
def test_occupancy_falls_with_what_a_block_takes(
    name: str, one: tuple[int, int, float], other: tuple[int, int, float]
) -> None:
    """More threads, registers or shared memory per block never give more blocks per SM."""
    limits = MODELS[name].limits
    first, second = legal(limits, one), legal(limits, other)
    low = tuple(min(pair) for pair in zip(first, second, strict=True))
    high = tuple(max(pair) for pair in zip(first, second, strict=True))
    assert occupancy(limits, *low).blocks >= occupancy(limits, *high).blocks


@settled
@given(gpus, shapes, st.integers(1, 10**7))
def test_demand_is_a_share(name: str, shape: tuple[int, int, float], blocks: int) -> None:
    """Each demand of a kernel that fits lies in [0, 1], and a kernel that does not fit is refused."""
    limits = MODELS[name].limits
    threads, regs, smem = legal(limits, shape)
    asked = kernel(threads, regs, smem, blocks)
    if occupancy(limits, threads, regs, smem).blocks < 1:
        with pytest.raises(PlanError):
            kernel_demand(limits, asked)
        return
    demand = kernel_demand(limits, asked)
    for share in (demand.threads, demand.regs, demand.smem, demand.slots, demand.residency):
        assert 0.0 <= share <= 1.0
    assert demand.residency > 0.0


@settled
@given(gpus, shapes, st.integers(1, 10**5), st.integers(1, 10**5))
def test_demand_grows_with_the_grid(name: str, shape: tuple[int, int, float], blocks: int, more: int) -> None:
    """A larger grid never needs less of the GPU."""
    limits = MODELS[name].limits
    threads, regs, smem = legal(limits, shape)
    if occupancy(limits, threads, regs, smem).blocks < 1:
        return
    small = kernel_demand(limits, kernel(threads, regs, smem, blocks))
    large = kernel_demand(limits, kernel(threads, regs, smem, blocks + more))
    assert small.residency <= large.residency
    assert small.threads <= large.threads


def test_model_survives_a_round_trip() -> None:
    """Writing a model and reading it again gives the same model."""
    for model in MODELS.values():
        assert msgspec.json.decode(msgspec.json.encode(model), type=HardwareModel) == model
