"""The recipe file: its defaults, and its errors in one line with file and place."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.errors import RecipeError
from gpusim.formats.recipe import Case
from gpusim.validation.recipe import MEASURED_IOS, read_recipe

GOOD = """
name = "small"
policies = ["wavefront", "search"]
streams = 4
budget_s = 0.05

[[case]]
spec = "m.py:a"
mode = "infer"
batch = 1

[[case]]
spec = "m.py:b"
mode = "train"
batch = 8
dtype = "bf16"
memory_format = "channels_last"
fitted = true
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "r.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_recipe_is_read_with_its_defaults(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, GOOD))
    assert (recipe.name, recipe.policies, recipe.streams, recipe.seed) == ("small", ("wavefront", "search"), 4, 0)
    first, second = recipe.case
    assert first == Case(spec="m.py:a", mode="infer", batch=1)
    assert (first.dtype, first.memory_format, first.frontend, first.fitted) == ("tf32", "contiguous", "aten", False)
    assert (recipe.counts, recipe.random, recipe.pairs, recipe.recordings) == ((), 0, 0, 7)
    assert (second.dtype, second.memory_format, second.fitted) == ("bf16", "channels_last", True)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "validate").glob("*.toml")), ids=lambda p: p.stem)
def test_bundled_recipes_can_be_read(path: Path) -> None:
    assert read_recipe(path).case


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"name = ", "is not valid TOML: "),
        (b'{"name": "x"}', "is not valid TOML: "),
        (b"name = '\xff'", "is not valid TOML: "),
        (b"", "$: Object missing required field `name`"),
        (b'name = "x"', "$: Object missing required field `case`"),
        (b'name = "x"\ncase = []', "$.case: has no cases"),
        (GOOD.replace("streams", "stream").encode(), "$: Object contains unknown field `stream`"),
        (f"random = {10**9}\n{GOOD}".encode(), "$.random: Expected `int` <= 1000"),
        (GOOD.replace("batch = 8", "batch = 0").encode(), "$.case[1].batch: Expected `int` >= 1"),
        (
            GOOD.replace("batch = 8", "batch = 8\nbacth = 1").encode(),
            "$.case[1]: Object contains unknown field `bacth`",
        ),
        (GOOD.replace('"infer"', '"inference"').encode(), "$.case[0].mode: Invalid enum value 'inference'"),
        (GOOD.replace("wavefront", "wavefrnt").encode(), "$.policies[0]: unknown policy 'wavefrnt' (there are: "),
        (f"counts = [2, 129]{GOOD}".encode(), "$.counts[1]: Expected `int` <= 128"),
        (f"counts = [0]{GOOD}".encode(), "$.counts[0]: Expected `int` >= 1"),
        (f"random = -1{GOOD}".encode(), "$.random: Expected `int` >= 0"),
        (f"recordings = 0{GOOD}".encode(), "$.recordings: Expected `int` >= 1"),
    ],
)
def test_broken_recipe_is_one_line_with_file_and_place(text: bytes, complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {complaint}")
    assert "\n" not in message


def test_each_policy_of_the_list_is_one_name(tmp_path: Path) -> None:
    """One name has a comma, several have spaces."""
    with pytest.raises(RecipeError) as caught:
        read_recipe(write(tmp_path, GOOD.replace("wavefront", "wavefrnt")))
    listed = str(caught.value).partition("(there are: ")[2].removesuffix(")")
    names = listed.strip("'").split("', '")
    assert {MEASURED_IOS, "ios", "with variants", "search"} <= set(names)
    assert not {"measured stages", "ios, measured stages, nimble"} & set(names)
    for name in names:
        known = GOOD.replace("wavefront", name)
        assert read_recipe(write(tmp_path, f"trials = 1{known}" if name == MEASURED_IOS else known)).policies[0] == name


OF_THE_TRACE = "mode, batch, dtype, memory format and front end are those of the trace; leave them out"


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        ("", "needs either 'spec' (with 'mode' and 'batch') or 'trace'"),
        ("fitted = true", "needs either 'spec' (with 'mode' and 'batch') or 'trace'"),
        (
            'spec = "m.py:a"\nmode = "infer"\nbatch = 1\ntrace = "vgg16-infer-b1"',
            "needs either 'spec' (with 'mode' and 'batch') or 'trace'",
        ),
        ('spec = "m.py:a"\nbatch = 1', "'m.py:a' needs 'mode' and 'batch'"),
        ('spec = "m.py:a"\nmode = "infer"', "'m.py:a' needs 'mode' and 'batch'"),
        ('trace = "vgg16-infer-b1"\nmode = "infer"', OF_THE_TRACE),
        ('trace = "vgg16-infer-b1"\nbatch = 1', OF_THE_TRACE),
        ('trace = "vgg16-infer-b1"\ndtype = "bf16"', OF_THE_TRACE),
        (
            'trace = "vgg16-infer-b2"',
            "no trace 'vgg16-infer-b2': neither a file nor bundled (there are: decoder_small-infer-b1-bf16, ",
        ),
    ],
)
def test_case_is_either_a_spec_with_its_mode_and_batch_or_a_trace(case: str, complaint: str, tmp_path: Path) -> None:
    """The place is the case's: here the second."""
    good = '[[case]]\ntrace = "vgg16-infer-b1"\nfitted = true\n'
    path = write(tmp_path, f'name = "x"\n{good}[[case]]\n{case}')
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: $.case[1]: {complaint}")
    assert "\n" not in message


@pytest.mark.parametrize("number", [0, 3, -1, 99])
def test_number_of_a_case_comes_before_its_trace(number: int, tmp_path: Path) -> None:
    """As of a recipe of the clone that is read elsewhere: its traces are not there."""
    path = write(tmp_path, 'name = "x"\n[[case]]\ntrace = "there/a.json.gz"\n[[case]]\ntrace = "there/b.json.gz"\n')
    command = ["validate", str(path), "--stage", "measure", "--case", str(number)]
    with pytest.raises(RecipeError) as caught:
        CliRunner().invoke(cli, command, catch_exceptions=False)
    assert str(caught.value) == f"{path}: no case {number}: cases are numbered 1 to 2"
    with pytest.raises(RecipeError, match=r"\$\.case\[0\]: no trace 'there/a"):
        CliRunner().invoke(cli, [*command[:-1], "2"], catch_exceptions=False)


def test_missing_recipe_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"r\.toml: cannot be read: No such file"):
        read_recipe(tmp_path / "r.toml")
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        read_recipe(tmp_path)


SPEC = 'spec = "{}"\nmode = "infer"\nbatch = 1\n'


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ('trace = "a/t.json.gz"\n', 'trace = "b/t.json.gz"\n', "t"),
        ('trace = "vgg16-infer-b1"\n', 'trace = "a/vgg16-infer-b1.json.gz"\n', "vgg16-infer-b1"),
        (SPEC.format("m.py:a"), f'{SPEC.format("m.py:a")}memory_format = "channels_last"\n', "a-infer-b1"),
        (SPEC.format("timm:vgg16"), 'trace = "vgg16-infer-b1"\n', "vgg16-infer-b1"),
    ],
)
def test_two_cases_of_one_trace_name_are_refused(
    first: str, second: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would silently be the first: a folder of traces and a results file have one step for each name."""
    monkeypatch.chdir(tmp_path)
    for trace in ("a/t.json.gz", "b/t.json.gz", "a/vgg16-infer-b1.json.gz"):
        Path(trace).parent.mkdir(exist_ok=True)
        Path(trace).touch()
    path = write(tmp_path, f'name = "r"\n[[case]]\n{first}[[case]]\n{second}')
    with pytest.raises(RecipeError, match=rf"\$\.case\[1\]: has the same trace name as \$\.case\[0\]: '{name}\.json"):
        read_recipe(path)
    assert len(read_recipe(write(tmp_path, f'name = "r"\n[[case]]\n{first}[[case]]\n{first}')).case) == 2


def test_trials_of_neighbours_are_refused(tmp_path: Path) -> None:
    """Trials would replay one schedule of a neighbourhood whose times are to be compared."""
    path = write(tmp_path, f"trials = 4\nneighbours = 70{GOOD}")
    with pytest.raises(RecipeError, match=r"\$\.trials: trials replay the fastest of those tried, neighbours all"):
        read_recipe(path)
