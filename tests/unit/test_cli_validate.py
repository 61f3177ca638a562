"""`conch validate`: the operator's own words, with the place in the file."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from conch.api.inferenceservice import InvalidSpec, parse_service
from conch.api.places import field_path
from conch.cli.documents import MAX_NODES, read_documents
from conch.cli.main import app
from conch.cli.validate import is_ours, problems_of
from conch.workload.deployment import Images
from conch.workload.offline import Surroundings
from invalid_services import INVALID, Invalid
from makers import make_service

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

AROUND = Surroundings(Images("conch.example/conch:1", "triton.example/server:1"))
GOOD = """\
apiVersion: conch.dev/v1alpha1
kind: InferenceService
metadata: {name: resnet}
spec:
  models:
    - name: resnet50
      format: ONNX
      source: {uri: pvc://models/resnet50}
"""
BAD = """\
# a comment
apiVersion: conch.dev/v1alpha1
kind: InferenceService
metadata:
  name: resnet
spec:
  models:
    - name: resnet50
      format: ONNX
      source: {uri: pvc://models/resnet50}
    - name: other
      format: Onnx
      maxBatchsize: 4
      source:
        digest: sha256:12
  scaling:
    minReplicas: 5
    maxReplicas: 2
"""


def validate(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["validate", *arguments], input=stdin)


def lines_of(text: str) -> dict[str, str]:
    """Field → LINE:COLUMN of a text given on standard input."""
    found = (
        re.fullmatch(r"<stdin>:(\d+:\d+): ([^:]+): .*", line) for line in validate("-", stdin=text).stdout.splitlines()
    )
    return {match[2]: match[1] for match in found if match}


def test_a_valid_file_ends_with_0_and_says_nothing_on_standard_output(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    result = validate(str(tmp_path / "a.yaml"))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "1 InferenceService in 1 file checked: all valid\n"


def test_each_problem_has_file_line_and_column_of_its_field() -> None:
    assert lines_of(BAD) == {
        "spec.models[1].format": "12:15",
        "spec.models[1].maxBatchsize": "13:7",
        "spec.models[1].source.uri": "14:7",  # missing: where its parent stands
        "spec.models[1].source.digest": "15:17",
        "spec.scaling.minReplicas": "17:18",
    }
    assert validate("-", stdin=BAD).exit_code == 1


def test_a_misspelled_field_gets_a_hint_also_at_the_top() -> None:
    result = validate("-", stdin=BAD.replace("spec:\n", "specs:\n"))
    assert "<stdin>:6:1: specs: is not a field; did you mean spec?" in result.stdout
    assert "maxBatchsize: is not a field; did you mean maxBatchSize?" in validate("-", stdin=BAD).stdout


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_it_says_what_the_operator_says_and_points_into_the_file(case: Invalid) -> None:
    service = case.service()
    try:
        text = yaml.safe_dump(service, sort_keys=False, default_flow_style=False, allow_unicode=False)
        yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeEncodeError):
        pytest.skip("such a value can't stand in a YAML file")
    with pytest.raises(InvalidSpec) as caught:
        parse_service(yaml.safe_load(text))
    (document,), _ = read_documents(text, "file")
    found = {problem.message: problem.to_dict() for problem in problems_of(document, AROUND)}
    assert found.keys() == set(caught.value.problems)
    for problem in found.values():
        line = text.splitlines()[problem["line"] - 1]
        assert 1 <= problem["column"] <= len(line) + 1
        way = field_path(problem["message"])
        assert way, problem["message"]
        name = [step for step in way if isinstance(step, str)]
        # The field's own line, or where it would belong: that of the nearest thing above it.
        assert any(f"{step}:" in line for step in name) or line.lstrip().startswith(("- ", '"', "apiVersion:")), (
            problem,
            line,
        )


def test_the_path_of_a_problem_is_read_back_from_its_words() -> None:
    assert field_path("spec.models[1].source.uri: is required") == ("spec", "models", 1, "source", "uri")
    assert field_path('spec.models[0].parameters["a: b\\"]"]: must') == ("spec", "models", 0, "parameters", 'a: b"]')
    assert field_path("spec.models[0].config.dynamic_batching: x")[-1] == "dynamic_batching"
    assert field_path("and 3 more") == ()


TEXTS: list[tuple[str, str, str]] = [
    ("a duplicate key", GOOD + "      format: Python\n",
     '<stdin>:9:7: the key "format" is written twice; line 7 has it already; remove one of them'),
    ("a syntax error", "spec:\n  models: [\n", "<stdin>:3:1: is not YAML"),
    ("a tab", "spec:\n\tmodels: []\n", "<stdin>:2:1: is not YAML: while scanning for the next token found character"),
    ("a line that is indented otherwise", "a:\n  - b: 1\n   c: 2\n",
     "<stdin>:3:4: is not YAML: while parsing a block collection"),
    ("text with a colon", "a: b: c\n", "; indent the line as its neighbours, and put text that holds ': ' in quotes"),
    ("a control character", "a: \x01\n", "is not YAML: special characters are not allowed"),
    ("an unknown tag", "a: !vault x\n", '<stdin>:1:4: has the tag "!vault", which kubectl doesn\'t know; remove it'),
    ("a tag that doesn't fit", "---\na: !!int foo\n", "<stdin>:2:1: holds a value that its tag doesn't fit"),
    ("an alias of its own parent", "a: &a [*a]\n", "is an alias of something that holds it"),
    ("brackets without end", "[" * 5000, "is nested too deeply"),
    ("aliases that explode", "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)),
     f"its aliases stand for more than {MAX_NODES} values"),
    ("two of one name", f"{GOOD}---\n{GOOD}",
     "<stdin>:12:18: metadata.name: line 3 has an InferenceService of this name already; rename one"),
    ("no kind", GOOD.replace("kind: InferenceService\n", ""), "<stdin>:1:1: kind: is required; add it"),
    ("another version", GOOD.replace("v1alpha1", "v9"), "<stdin>:1:13: apiVersion: must be conch.dev/v1alpha1"),
    ("another kind of the group", GOOD.replace("InferenceService", "InferenceServise"), "<stdin>:2:7: kind: must be"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), [case[1:] for case in TEXTS], ids=[case[0] for case in TEXTS])
def test_what_is_wrong_with_the_text_itself_is_told_with_its_line(text: str, says: str) -> None:
    result = validate("-", stdin=text)
    assert result.exit_code == 1
    assert says in result.stdout


def test_anchors_and_merges_are_followed_to_where_the_value_stands() -> None:
    text = GOOD.replace("{uri: pvc://models/resnet50}", "&where {uri: ftp://models/resnet50}")
    text += "    - {name: again, format: ONNX, source: *where}\n    - {<<: {format: Caffe}, name: b, source: *where}\n"
    found = lines_of(text)
    assert found["spec.models[0].source.uri"] == found["spec.models[1].source.uri"] == "8:28"
    assert found["spec.models[2].format"].startswith("10:")


def test_scalars_are_read_as_kubectl_reads_them() -> None:
    documents, _ = read_documents("{a: 18:00, b: 2020-01-01, c: 1e3, d: yes, e: 0x10, f: 1.5, 5: x, g: ~}", "x")
    assert documents[0].data == {
        "a": "18:00", "b": "2020-01-01", "c": 1000.0, "d": True, "e": 16, "f": 1.5, "5": "x", "g": None,
    }  # fmt: skip


def test_other_kinds_are_skipped_and_counted_kserve_s_namesake_too() -> None:
    others = (
        "---\nkind: ConfigMap\napiVersion: v1\n---\nkind: InferenceService\napiVersion: serving.kserve.io/v1beta1\n"
    )
    result = validate("-", stdin=GOOD + others)
    assert result.exit_code == 0
    assert result.stderr == "1 InferenceService in 1 file checked: all valid; 2 objects of other kinds skipped\n"


def test_a_misspelled_group_is_told_and_not_skipped() -> None:
    result = validate("-", stdin=GOOD.replace("conch.dev/v1alpha1", "conch.io/v1alpha1"))
    assert result.exit_code == 1
    assert 'apiVersion: must be conch.dev/v1alpha1 (got "conch.io/v1alpha1")' in result.stdout
    other = validate("-", stdin="apiVersion: torch.dev/v1\nkind: Training\n")
    assert (other.exit_code, other.stdout) == (0, "")


def test_the_items_of_a_list_are_looked_at() -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": [make_service(), make_service(name="b", paused="yes")]}
    result = validate("-", "--output=json", stdin=json.dumps(listed, indent="\t"))
    answer = json.loads(result.stdout)
    assert (answer["checked"], answer["valid"]) == (2, False)
    (problem,) = answer["problems"]
    assert (problem["field"], problem["resource"]) == ("spec.paused", "default/b")
    assert '"paused": "yes"' in json.dumps(listed, indent="\t").splitlines()[problem["line"] - 1]


def test_folders_are_searched_to_the_bottom_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for name, text in {"a.yaml": GOOD, "b/c/d.yml": BAD, "b/e.json": json.dumps(make_service()), ".git/f.yaml": "[",
                       "g.txt": "["}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    result = validate(str(tmp_path))
    assert "3 InferenceServices in 3 files checked: 1 invalid, 5 problems" in result.stderr
    assert all(line.startswith(str(tmp_path / "b/c/d.yml")) for line in result.stdout.splitlines())


def test_a_file_that_can_t_be_read_ends_with_2_and_the_others_are_still_checked(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(BAD)
    (tmp_path / "latin.yaml").write_bytes(b"a: b\nname: mod\xe8le\n")
    result = validate(str(tmp_path / "no.yaml"), str(tmp_path / "latin.yaml"), str(tmp_path / "bad.yaml"))
    assert result.exit_code == 2
    assert "no.yaml: can't be read (No such file or directory)" in result.stderr
    assert "latin.yaml:2: is not UTF-8 text" in result.stderr
    assert "spec.models[1].format" in result.stdout


def test_annotations_for_a_check_run_are_one_escaped_line_each() -> None:
    text = GOOD.replace("pvc://models/resnet50", '"ftp://100%\\n::error::x"')
    lines = validate("-", "--output=github", stdin=text).stdout.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("::error file=<stdin>,line=8,col=21::spec.models[0].source.uri: ")
    assert "%0A" not in lines[0].partition("100")[0]


def test_a_plan_that_no_pod_can_carry_is_refused_as_by_the_operator() -> None:
    parameters = {f"key-{n}": "x" * 1000 for n in range(60)}
    models: list[dict[str, Any]] = [
        {"name": f"m{n}", "format": "Python", "source": {"uri": "pvc://a/b"}, "parameters": parameters}
        for n in range(6)
    ]
    result = validate("-", stdin=yaml.safe_dump(make_service(models=models)))
    assert result.exit_code == 1
    assert "spec.models: their configuration takes" in result.stdout
    assert "200 KiB fit into a pod" in result.stdout


def test_a_wrong_setting_in_the_environment_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONCH_WORKERS", "many")
    result = validate("-", stdin=GOOD)
    assert result.exit_code == 2
    assert "CONCH_WORKERS:" in result.stderr


REFUSED = {
    "an engine of another TensorRT": (
        {
            "models[0].format": "TensorRT",
            "models[0].source.engine": {"tensorRT": "10.5.0"},
            "runtime.image": "nvcr.io/nvidia/tritonserver:24.09-py3",
        },
        "spec.models[0] (resnet50): the engine was built with TensorRT 10.5.0, and the image has 10.4.0",
    ),
    "a format that the image lacks": (
        {"models[0].format": "vLLM", "runtime.image": "nvcr.io/nvidia/tritonserver:24.09-py3"},
        "spec.models[0].format: vLLM has no backend in this image",
    ),
    "a release that the image isn't": (
        {"runtime": {"release": "24.10", "image": "nvcr.io/nvidia/tritonserver:24.09-py3"}},
        "spec.runtime.release: is 24.10, and the image's tag says 24.09",
    ),
}


@pytest.mark.parametrize(("fields", "says"), REFUSED.values(), ids=REFUSED)
def test_what_the_operator_would_hold_back_is_told_too(fields: dict[str, Any], says: str) -> None:
    result = validate("-", "--output=json", stdin=yaml.safe_dump(make_service(fields)))
    assert result.exit_code == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["message"].startswith(says)
    assert problem["line"] > 5


def test_code_is_refused_where_the_operator_s_settings_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = yaml.safe_dump(make_service({"models[0].format": "Python"}))
    assert validate("-", stdin=text).exit_code == 0
    monkeypatch.setenv("CONCH_ALLOW_PYTHON_MODELS", "false")
    result = validate("-", stdin=text)
    assert result.exit_code == 1
    assert "spec.models[0].format: Python runs Python code that comes with the model" in result.stdout


@given(st.text("{}[]:,-&*!|>%@`\"'\\ \n\tab1~#?<=.", max_size=80))
def test_any_text_is_read_or_told_what_is_wrong_with_it(text: str) -> None:
    documents, faults = read_documents(text, "file")
    for fault in faults:
        assert fault.message
        assert fault.place.line >= 1
    for document in documents:
        if is_ours(document.data):
            assert list(problems_of(document, AROUND))
