"""`gpusim capture --counters`: ncu's table read and matched with the trace, and every way in which that can fail."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from gpusim.errors import CaptureError, GpuError
from gpusim.formats.trace import Counters, Kernel, Trace
from gpusim.gpu.capture import counted_step, counters
from gpusim.gpu.capture.counters import METRICS, attach, find_ncu, ncu_command, parse_ncu, with_counters
from gpusim.trace.kernel_names import SHOWN_CHARS, base_name, convolves, multiplies_matrices, shown_name
from gpusim.trace.store import read_trace, write_trace
from tests.support.helpers import Step, make_trace, memset, op
from tests.support.networks import CPU

SAMPLE = (Path(__file__).parents[1] / "data" / "ncu_h200.csv").read_text()

HEADER = ("ID", "Process ID", "Kernel Name", "Block Size", "Grid Size", *METRICS.values())
UNITS = ("", "", "", "", "", "byte", "byte", "inst", "inst", "byte")


def table(
    *rows: tuple[str, ...], units: tuple[str, ...] = UNITS, before: str = "==PROF== Connected to process 7\n"
) -> str:
    """Return a table as ncu writes it: quoted, between its log lines."""
    lines = [",".join(f'"{cell}"' for cell in row) for row in (HEADER, units, *rows)]
    return before + "\n".join(lines) + "\n==PROF== Disconnected from process 7\n"


def row(
    number: int, name: str, grid: int = 1, values: tuple[str, ...] = ("10", "20", "30", "0", "32768")
) -> tuple[str, ...]:
    return (str(number), "7", name, "(1024, 1, 1)", f"({grid}, 1, 1)", *values)


def named(name: str, grid: int = 1) -> Kernel:
    return Kernel(name=name, dur_ns=1000, grid=(grid, 1, 1), block=(1024, 1, 1))


def two_ops() -> Trace:
    """Make three kernels and a memset, which ncu does not see."""
    first = Step("first", "x", "a", kernels=(memset(500), named("void ns::gemm<float, 4>(float*)", 3)))
    second = Step("second", "a", "b", kernels=(named("add(int)"), named("void add2<1>(int)")))
    return make_trace([first, second])


GOOD = table(row(0, "void ns::gemm<float, (int)4>(T1 *)", 3), row(1, "add(int)"), row(2, "add2"))


# --- Reading ncu's table ---


def test_real_table_is_read() -> None:
    """ncu wrote 221 such rows on an H200; the file has the units and the first twelve launches."""
    launches = parse_ncu(SAMPLE)
    assert len(launches) == 12
    assert base_name(launches[0].name) == "implicit_convolve_sgemm"
    assert (launches[0].grid, launches[0].block) == ((3136, 2, 1), (8, 8, 1))
    assert launches[0].counters == Counters(
        dram_bytes=16_933_376,
        l2_bytes=204_566_176,
        instructions=76_056_864,
        tensor_instructions=275_968,
        smem_config_bytes=102_400,
    )


def test_lines_of_ncu_around_the_table_and_separators_are_understood() -> None:
    values = ("1,024", "2.5", "3e3", "0", "8")
    units = ("",) * 5 + ("Kbyte", "Mbyte", "inst", "Kinst", "byte")
    text = table(row(0, 'k<a, b>(int, ""x"")', values=values), units=units)
    (launch,) = parse_ncu(text)
    assert launch.counters == Counters(
        dram_bytes=1_024_000, l2_bytes=2_500_000, instructions=3000, tensor_instructions=0, smem_config_bytes=8
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no table of counters: no output"),
        (
            "==PROF== x\n==ERROR== The application returned an error code (1).\n",
            "The application returned an error code",
        ),
        (table().replace("dram__bytes.sum", "dram__octets.sum"), "no column 'dram__bytes.sum'"),
        (table(row(0, "k", values=("n/a", "1", "1", "1", "1"))), "'n/a' for 'dram__bytes.sum' of launch 0"),
        (table(row(0, "k"), units=("",) * 5 + ("%", "byte", "inst", "inst", "byte")), "'dram__bytes.sum' in '%'"),
    ],
)
def test_table_that_cannot_be_read_is_one_line(text: str, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        parse_ncu(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("void at::native::(anonymous namespace)::cat<float, 4>(float*, int)", "cat"),
        ("void at::native::<unnamed>::cat<float, (int)4>(T1 *, int)", "cat"),
        ("ampere_sgemm_32x32_sliced1x4_nn", "ampere_sgemm_32x32_sliced1x4_nn"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float>(T2)", "nchwToNhwcKernel"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float, 7>(cublasGemvParams<int>)",
            "kernel",
        ),
        ("void ns::gemm<(int)4, (bool)(3 > 2), f<int>>(T1 *)", "gemm"),
        ("Memset (Device)", "Memset"),
        ("", ""),
        # Mangled: the profiler leaves names of more than 1,024 characters unchanged.
        ("_Z3addPfi", "add"),
        ("_ZL3addPfi", "add"),
        ("_Z4gemmIfLb0ELin5EEvPT_", "gemm"),
        ("_ZN2ns4gemmIfLi4EEEvPf", "gemm"),
        ("_ZN2at6native12_GLOBAL__N_13catIfLi4EEEvPT_i", "cat"),
        ("_ZN39_GLOBAL__N__8e7a1b2c_7_file_cu_3a4b5c6d3catEPf", "cat"),
        ("_ZN7cutlass6KernelINS_4conv9GemmShapeILi64ELi128EEELNS1_8OperatorE2EEEEvNT_6ParamsE", "Kernel"),
        ("_ZN2at6native6unrollIZZNS0_4fillERNS_8IteratorEENKUlvE0_clEvEUlfE_St5arrayIPcLm2EEEEviT0_T1_", "unroll"),
        ("_ZN1a1kIXgtT_Li3EEL_ZN1c1dEvEJfN1a1bEEEEvT0_", "k"),
        # Not mangled, or cut off.
        ("_Zebra", "_Zebra"),
        ("_ZN2ns4gemmIfLi4", "_ZN2ns4gemmIfLi4"),
    ],
)
def test_names_are_compared_without_what_tools_write_differently(name: str, base: str) -> None:
    assert base_name(name) == base


@pytest.mark.parametrize(
    ("name", "multiplies"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x128_32x3_nn_align4>(Params)", True),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize64x64x64_stage3", True),
        ("nvjet_sm90_tst_64x128_64x8_1x2_h_bz_splitK_TNT", True),
        ("void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>(int)", True),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Params)", True),
        ("void cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace_kernel<(int)0>()", False),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::Params)", False),
        ("void cutlass__5x_cudnn::Kernel<cutlass__5x_cudnn::reduction::kernel::ReduceSplitK<float>>()", False),
        ("void internal::gemvx::kernel<int, int, float, float>(cublasGemvParams)", False),
        ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float>()", False),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<float, float>()", False),
        ("void cudnn::bn_fw_tr_1C11_singleread<float, 512>()", False),
    ],
)
def test_kernels_that_multiply_matrices_are_known_by_their_names(name: str, multiplies: bool) -> None:
    assert multiplies_matrices(name) == multiplies


@pytest.mark.parametrize(
    ("name", "convolution"),
    [
        ("aten.convolution_backward.default", True),
        ("extern_kernels.convolution", True),
        ("void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1>(int)", True),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize64x64x64_stage3", True),
        ("cutlass_tensorop_s1688dgrad_optimized_tf32_128x64_32x3_nhwc_align4", True),
        ("void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>(int)", True),
        ("aten.addmm.default", False),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64", False),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Params)", False),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x128, NumericArrayConverter<float>>(Params)", False),
    ],
)
def test_convolutions_are_known_by_the_names_of_operators_and_kernels(name: str, convolution: bool) -> None:
    assert convolves(name) == convolution


def test_name_in_a_message_is_short() -> None:
    long = "k" * 3000
    assert len(shown_name(long)) == SHOWN_CHARS
    assert shown_name(long).endswith("...")
    assert shown_name("void ns::gemm<float>(float*)") == "gemm"


# --- Matching ---


def test_mangled_name_of_the_profiler_matches_that_of_ncu() -> None:
    """cuDNN's CUTLASS kernels have names of 1,600 characters, which only ncu demangles."""
    arguments = "NS_9GemmShapeILi64ELi128ELi16EEE" * 50
    step = Step("a", "x", "y", kernels=(named(f"_ZN17cutlass__5x_cudnn6KernelI{arguments}EEvNT_6ParamsE", 2),))
    demangled = "void cutlass__5x_cudnn::Kernel<cutlass__5x_cudnn::GemmShape<(int)64>>(T1::Params)"
    found = attach(make_trace([step]), parse_ncu(table(row(0, demangled, 2))))
    assert found.ops[0].kernels[0].counters is not None
    with pytest.raises(CaptureError) as caught:
        attach(make_trace([step]), parse_ncu(table(row(0, "Other", 2))))
    assert "in the trace it is 'Kernel' with grid 2x1x1" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_each_kernel_gets_its_counters_and_a_memset_none() -> None:
    found = attach(two_ops(), parse_ncu(GOOD))
    kernels = [kernel for node in found.ops for kernel in node.kernels]
    assert [kernel.counters is not None for kernel in kernels] == [False, True, True, True]
    assert kernels[1].counters == Counters(
        dram_bytes=10, l2_bytes=20, instructions=30, tensor_instructions=0, smem_config_bytes=32_768
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((row(0, "gemm", 3), row(1, "other"), row(2, "add2")), "op 1 'second' launched 'other' with grid 1x1x1"),
        ((row(0, "gemm", 4), row(1, "add"), row(2, "add2")), "the trace it is 'gemm' with grid 3x1x1, block"),
        ((row(0, "gemm", 3), row(1, "add")), "ncu saw 2 kernels, the trace has 3"),
        ((row(0, "gemm", 3), row(1, "add"), row(2, "add2"), row(3, "add2")), "ncu saw 4 kernels, the trace has 3"),
    ],
)  # fmt: skip
def test_step_that_is_not_the_same_is_refused(rows: tuple[tuple[str, ...], ...], message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        attach(two_ops(), parse_ncu(table(*rows)))
    assert message in str(caught.value)


# --- ncu as a program ---


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program named ncu on PATH; tests write its behaviour into the returned file, as Python."""
    program, does = tmp_path / "ncu", tmp_path / "does.py"
    does.write_text("")
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "if '--version' in sys.argv:\n"
        "    print('NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)')\n"
        "    sys.exit()\n"
        "log = next(a for a in sys.argv if a.startswith('--log-file=')).partition('=')[2]\n"
        f"exec(open({str(does)!r}).read())\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    return does


def test_counters_of_a_step_come_from_ncu_and_the_trace_says_so(fake_ncu: Path, tmp_path: Path) -> None:
    fake_ncu.write_text(f"open(log, 'w').write({GOOD!r})")
    trace = two_ops()
    assert trace.provenance.counters == ""
    found = with_counters(trace, 0)
    assert found.provenance.counters == "ncu 2025.3.1.0"
    assert found.ops[1].kernels[1].counters is not None
    path = tmp_path / "t.json"
    write_trace(found, path)
    assert read_trace(path) == found


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("open(log, 'w').write('==ERROR== ERR_NVGPUCTRPERM - no permission'); sys.exit(1)", "for administrators"),
        ("print('==ERROR== ERR_NVGPUCTRPERM'); sys.exit(0)", "NVreg_RestrictProfilingToAdminUsers"),
        ("sys.stderr.write('Traceback\\nRuntimeError: no device'); sys.exit(3)", "status 3): RuntimeError: no device"),
        ("open(log, 'w').write('==ERROR== Unknown option'); sys.exit(1)", "Unknown option"),
    ],
)  # fmt: skip
def test_ncu_that_fails_is_one_line(fake_ncu: Path, does: str, message: str) -> None:
    fake_ncu.write_text(does)
    with pytest.raises(GpuError) as caught:
        with_counters(two_ops(), 0)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ncu_that_counted_nothing_is_refused(fake_ncu: Path) -> None:
    with pytest.raises(CaptureError, match="no table"):
        with_counters(two_ops(), 0)


def test_without_ncu_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counters, "PLACES", (str(tmp_path / "nowhere-*" / "ncu"),))
    with pytest.raises(GpuError, match="no ncu"):
        find_ncu()
    (tmp_path / "nowhere-2").mkdir()
    (tmp_path / "nowhere-2" / "ncu").touch()
    assert find_ncu() == str(tmp_path / "nowhere-2" / "ncu")


def test_clocks_and_caches_are_left_alone() -> None:
    command = ncu_command("ncu", Path("t.json"), Path("c.csv"), 3)
    assert {"--clock-control=none", "--cache-control=none", "--profile-from-start=off"} <= set(command)
    assert command[-4:] == ["-m", "gpusim.gpu.capture.counted_step", "t.json", "3"]


def test_counted_step_runs_the_step_once_before_and_once_within_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ncu counts the second run, from the same state as the first."""
    relu = Step("relu", "x", "y", target="aten.relu.default", kernels=(named("relu"),))
    path = tmp_path / "t.json"
    write_trace(make_trace([relu], outputs="y"), path)
    log: list[str] = []
    monkeypatch.setattr(counted_step, "require_gpu", lambda: CPU)
    monkeypatch.setattr(counted_step, "set_precision", lambda dtype: log.append(dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "profiler", SimpleNamespace(start=lambda: log.append("start"), stop=lambda: log.append("stop"))
    )
    run = counted_step.Runner.run_in_order
    monkeypatch.setattr(
        counted_step.Runner, "run_in_order", lambda self, releases: (log.append("run"), run(self, releases))[1]
    )
    counted_step.main(str(path), 0)
    assert log == ["tf32", "run", "start", "run", "stop"]


def test_counted_traffic_replaces_the_estimate() -> None:
    """The op graph takes DRAM bytes from counters where it has some."""
    from gpusim.plan.kernels import kernel_tasks
    from tests.support.helpers import make_hardware

    trace = make_trace([op("a", "x")])
    counted = Counters(dram_bytes=12_345, l2_bytes=0, instructions=0, tensor_instructions=0)
    kernel = msgspec.structs.replace(trace.ops[0].kernels[0], counters=counted)
    trace = msgspec.structs.replace(trace, ops=(msgspec.structs.replace(trace.ops[0], kernels=(kernel,)),))
    assert kernel_tasks(trace, make_hardware())[0][0].dram_bytes == 12_345
