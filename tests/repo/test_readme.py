"""README and docs agree with the files they describe."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import statistics
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import OutputError
from gpusim.formats.hardware import load_hardware
from gpusim.plan.estimated_kernels import CONSTANTS, Constants
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES
from gpusim.quantiles import quantile
from gpusim.report.pages import with_section
from gpusim.trace.store import bundled_traces, load_trace, read_manifest, write_trace
from gpusim.units import format_times_ns
from gpusim.validation.tables import write_results
from tests.support.helpers import make_hardware, make_trace, op
from tests.support.made_results import case as make_case
from tests.support.made_results import make_results

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "research").glob("*.md")),
]
COMMANDS = {
    "main": "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/gpusim explore googlenet-train-b8",
    "tests": (
        'python3 -m venv .venv-test && .venv-test/bin/pip install torch==2.13.0 ".[test,sweep]"'
        " && .venv-test/bin/python -m pytest"
    ),
}

SAMPLE = "googlenet-train-b8"
#: A row of the table that `gpusim explore` prints: policy, streams, predicted time.
ROW = re.compile(r"^ (\w+) +│ +(\d+) │ +([\d.]+ [mun]?s) │", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\s]+)`")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
#: A path of this repository; a capitalised word, as in hwmodels/NAME.json, stands for any name.
OWN_PATH = re.compile(r"^(?:gpusim|hwmodels|traces|validate|scripts|docs|research|tests|\.ci)/[^A-Z<]*$")


def script(name: str) -> ModuleType:
    """Load a module of scripts/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def prose(page: Path) -> str:
    """Return the page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(prose(page)))
    return {title.strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_readme_has_the_commands_that_ci_runs(name: str) -> None:
    assert f"<!-- command: {name} -->\n```sh\n{COMMANDS[name]}\n```\n" in (ROOT / "README.md").read_text("utf-8")


def test_readme_shows_the_newest_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("make_readme_table").main(["--check"]) == 0, capsys.readouterr().out


def test_readme_tells_what_kernels_gain_and_what_streams_gain_apart() -> None:
    text = (ROOT / "README.md").read_text("utf-8").partition("<!-- results:begin -->")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) >= 12
    for row in rows:
        assert not row[4].endswith("(1)"), "a schedule on one stream is not concurrent"
        eager, graph, schedule = (float(cell.split(" ")[0]) for cell in (row[1], row[2], row[4]))
        kernels, streams, over_eager = (float(cell.strip("*x")) for cell in row[5:8])
        assert abs(kernels * streams / (graph / schedule) - 1) < 0.01
        assert abs(over_eager / (eager / schedule) - 1) < 0.01


@pytest.mark.parametrize(
    ("step", "policy"),
    [
        ("nasnetalarge-infer-b1", "critical_path"),  # on captured kernels, replayed in the same run
        ("squeezenet1_1-infer-b1", "round_robin"),  # on chosen kernels, where the run has no row of a policy
    ],
)
def test_readme_marks_a_searched_schedule_that_is_a_policys(step: str, policy: str) -> None:
    text = (ROOT / "README.md").read_text("utf-8").partition("<!-- results:begin -->")[2]
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{step}`")]
    assert [cell.strip() for cell in row.split("|")][10] == policy


def test_a_schedule_is_a_policys_if_launch_order_and_streams_are_equal() -> None:
    """Two chains that do not meet: by turns on two streams is round_robin's; both on one of two streams is nobody's."""
    graph = OpGraph.build(make_trace([op("a"), op("b"), op("c", "a"), op("d", "b")]), make_hardware())
    alike = script("make_readme_table").planned_alike
    assert "round_robin" in alike(graph, POLICIES["round_robin"](graph, 2))
    assert alike(graph, Schedule((0, 1, 2, 3), (0, 0, 1, 0))) == []


def test_fair_comparison_is_that_of_the_hand_worked_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 ns on one stream, 1600 with the fastest kernels; policies 1000, 995 and 990, the search 900 and 1100."""
    page = script("make_accuracy_page")
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert page.fair() == []
    rows = [
        ("nimble", "captured", 1000),
        ("opara", "captured", 1200),
        ("turbodl", "captured", 995),
        ("search", "captured", 900),
        ("fastest kernels", "chosen", 1600),
        ("nimble", "chosen", 990),
        ("search", "chosen", 1100),
    ]
    cases = [
        msgspec.structs.replace(make_case(1, time_ns), policy=policy, kernels=kernels)
        for policy, kernels, time_ns in rows
    ]
    write_results(make_results(cases, recipe="fair"), tmp_path)
    captured, chosen = page.fair()[-2:]
    assert captured == "|captured|1.00x|2.22x|1, 1.106 (1.106 to 1.106)|1.111 (1)|"
    assert chosen == "|chosen|1.25x|2.02x|1, 0.900 (0.900 to 0.900)|0.900 (0)|"


def test_page_without_markers_is_one_line_with_its_name() -> None:
    assert with_section("a <b> old <e> c", "p.md", "<b>", "<e>", "new") == "a <b>\nnew\n<e> c"
    with pytest.raises(OutputError, match=r"p\.md: no section between <b> and <e>"):
        with_section("a <b> old", "p.md", "<b>", "<e>", "new")


def test_table_of_searched_schedules_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("make_results_table").main(["--check"]) == 0, capsys.readouterr().out


def test_readme_shows_what_explore_prints() -> None:
    """Rows of policies only; those of the search depend on its time."""
    if SAMPLE not in bundled_traces():
        return
    graph = OpGraph.build(load_trace(SAMPLE), load_hardware("h200"))
    shown = {row[1]: (int(row[2]), row[3]) for row in ROW.finditer((ROOT / "README.md").read_text("utf-8"))}
    explored = {name: policy for name, policy in POLICIES.items() if not policy.slow}
    assert set(explored) <= set(shown)
    found = {}
    for policy, make in explored.items():
        schedule = make(graph, shown[policy][0])
        timeline = ReferenceEngine().run(lower(graph, schedule), graph.hardware, False)
        found[policy] = timeline.makespan_ns
    assert {policy: shown[policy][1] for policy in explored} == dict(
        zip(found, format_times_ns(found.values()), strict=True)
    )


@pytest.mark.parametrize("trace", ["squeezenet1_1-infer-b1", "googlenet-infer-b1"])
def test_policies_page_shows_what_the_simulator_predicts(trace: str) -> None:
    """Two of its rows; all would take too long."""
    if trace not in bundled_traces():
        return
    table = script("make_policy_table")
    row = table.predict(trace)
    lines = (ROOT / "research" / "2026-11-23-policies.md").read_text("utf-8").splitlines()
    assert table.time_line(row) in lines, "run python scripts/make_policy_table.py"
    assert table.speedup_line(row) in lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_in_the_text_exist(page: Path) -> None:
    paths = [path for path in CODE.findall(prose(page)) if OWN_PATH.match(path)]
    assert [path for path in paths if not any(ROOT.glob(path.rstrip("/")))] == []


def test_indexes_list_every_page() -> None:
    for folder in (ROOT / "docs", ROOT / "docs" / "commands"):
        index = (folder / "index.md").read_text(encoding="utf-8")
        assert {page.name for page in folder.glob("*.md")} - {"index.md"} <= set(LINK.findall(index))


def test_notebook_lists_every_entry_and_stays_out_of_the_index() -> None:
    entries = {page.name for page in (ROOT / "research").glob("*.md")} - {"README.md"}
    links = LINK.findall((ROOT / "research" / "README.md").read_text("utf-8"))
    assert {link for link in links if not link.startswith("../")} == entries
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md", entry) for entry in entries)
    assert "research/" not in (ROOT / "docs" / "index.md").read_text("utf-8")


def test_manifest_is_of_these_traces() -> None:
    manifest = {entry["name"]: entry["sha256"] for entry in read_manifest()}
    files = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in bundled_traces().items()}
    assert manifest == files


def test_manifest_says_what_the_traces_say() -> None:
    made = script("make_manifest").manifest(next(iter(bundled_traces().values())).parent) if bundled_traces() else None
    assert made is None or made["traces"] == read_manifest()


def test_error_of_estimates_is_that_of_the_constants_in_use_on_all_stored_steps() -> None:
    """Steps in packed sets count, too, each once; those of Inductor's kernels do not."""
    judge = script("fit_estimates")
    errors = judge.errors_of(judge.rows(judge.read_steps(judge.captured_steps())), CONSTANTS)
    of_aten = {path.name for path in judge.captured_steps() if not path.name.endswith("-inductor.json.gz")}
    assert len(errors) == len(of_aten)
    off = sorted(100 * abs(error) for error in errors.values())
    median, most, largest = statistics.median(off), quantile(off, 0.9), off[-1]
    text = " ".join(prose(ROOT / "README.md").split())
    of_steps = f"was {median:.0f} % in the median of {len(errors)} steps, at most {most:.0f} % for nine of ten"
    assert f"{of_steps}, and {largest:.0f} % at the largest" in text
    shorter = f"kernel times {median:.0f} % off in the median, {largest:.0f} % at most"
    assert shorter in prose(ROOT / "docs" / "does-it-fit.md")


def test_a_step_captured_twice_counts_once_by_its_first_capture(tmp_path: Path) -> None:
    """Two ops, estimated at 2000 ns each; captured with 1000 ns each first, then with 4000."""
    judge = script("fit_estimates")
    files = [tmp_path / "first.json.gz", tmp_path / "second.json.gz"]
    for file, dur_ns in zip(files, (1000, 4000), strict=True):
        write_trace(make_trace([op("a", dur_ns=dur_ns), op("b", "a", dur_ns=dur_ns)], gpu="NVIDIA H200"), file)
    known = judge.rows(judge.read_steps(files))
    constants = {"elementwise": Constants(2000.0, 1e9, 1e9, 1.0, 0.0)}
    assert judge.errors_of(known, constants) == {"tiny-infer-b1": pytest.approx(1.0, abs=1e-6)}
