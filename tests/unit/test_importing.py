"""Model repositories that exist become services that render back to the same configurations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as pb

from conch.api.inferenceservice import parse_service
from conch.triton.importing import (
    Folder,
    Imported,
    NotImportableError,
    UnreadableConfigError,
    import_service,
    parse_config,
    related,
)
from conch.triton.modelconfig import from_pbtxt, model_config, to_pbtxt
from conch.triton.normalform import changes, normal_form
from modelconfigs import (
    NAME,
    NOT_CARRIED,
    every_field,
    field_table,
    random_config,
    random_ensemble,
    set_fields,
    wild_config,
)
from pbtxt_styles import STYLES, Style

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SEEDS = st.integers(0, 2**48)
EXAMPLES = 2000
QUICK = settings(suppress_health_check=list(HealthCheck))


def folder(config: str | None, *files: str, name: str = NAME, beside: Iterable[str] = ()) -> Folder:
    return Folder(name, config, {1: tuple(sorted(files))}, frozenset(beside))


def imported(*folders: Folder, accelerators: int | None = None) -> Imported:
    sources = {each.name: {"uri": f"s3://models/{each.name}"} for each in folders}
    return import_service(folders, name="service", sources=sources, accelerators=accelerators)


def rendered(service: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of each model, printed and parsed again."""
    spec = parse_service(service)
    gpu = spec.accelerator.count > 0
    return {model.name: from_pbtxt(to_pbtxt(model_config(model, gpu=gpu))) for model in spec.models}


def normal(config: Any, service: Mapping[str, Any], name: str = NAME) -> Any:
    model = next(each for each in service["spec"]["models"] if each["name"] == name)
    return normal_form(config, name, model["format"], gpu=service["spec"]["accelerator"]["count"] > 0)


def holds(whole: Any, part: Any) -> bool:
    """Whether data has these fields with these values; lists are compared as a whole."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and holds(whole[key], value) for key, value in part.items())
    return bool(whole == part)


# --- Triton's documentation


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_every_style_of_configuration_becomes_the_spec_that_says_the_same(style: Style) -> None:
    found = imported(folder(style.text, *style.files, beside=style.beside))
    (model,) = found.service["spec"]["models"]
    for key, value in style.becomes.items():
        assert holds(model[key], value), (key, model[key])
    assert not set(style.lacks) & set(model)
    assert [difference.field for difference in found.differences] == list(style.differs)


@pytest.mark.parametrize("style", [style for style in STYLES if not style.differs], ids=lambda style: style.name)
def test_every_style_renders_back_to_an_equivalent_configuration(style: Style) -> None:
    found = imported(folder(style.text, *style.files, beside=style.beside))
    wanted = normal(parse_config(style.text or ""), found.service)
    got = normal(rendered(found.service)[NAME], found.service)
    if not wanted.default_model_filename:
        got.default_model_filename = ""  # said where Triton would have to guess
    assert wanted == got


def test_the_documentation_is_covered_by_many_styles_of_different_names() -> None:
    assert len({style.name for style in STYLES}) == len(STYLES) >= 50


# --- any message


@given(SEEDS)
@settings(QUICK, max_examples=EXAMPLES)
def test_any_configuration_that_triton_loads_comes_back_equal(seed: int) -> None:
    config = random_config(seed)
    note(to_pbtxt(config))
    found = imported(folder(to_pbtxt(config)))
    assert found.differences == []
    assert normal(config, found.service) == normal(rendered(found.service)[NAME], found.service)


@given(SEEDS)
@settings(QUICK, max_examples=200)
def test_any_ensemble_comes_back_equal_with_its_members(seed: int) -> None:
    configs = random_ensemble(seed)
    found = imported(*(folder(to_pbtxt(config), "model.py", name=name) for name, config in configs.items()))
    assert found.differences == []
    back = rendered(found.service)
    for name, config in configs.items():
        assert normal(config, found.service, name) == normal(back[name], found.service, name)


@given(SEEDS)
@settings(QUICK, max_examples=400)
def test_a_configuration_that_makes_no_sense_is_still_a_valid_service_or_a_named_difference(seed: int) -> None:
    config = wild_config(seed)
    note(to_pbtxt(config))
    try:
        found = imported(folder(to_pbtxt(config)))
    except NotImportableError:
        return
    same = normal(config, found.service) == normal(rendered(found.service)[NAME], found.service)
    assert same == (found.differences == [])
    assert all(difference.field and len(str(difference)) < 1000 for difference in found.differences)


def test_the_random_messages_leave_no_field_of_the_message_out() -> None:
    set_somewhere: set[str] = set()
    for seed in range(1500):
        set_somewhere |= set(set_fields(random_config(seed)))
    for seed in range(20):
        set_somewhere |= set(set_fields(random_ensemble(seed)[NAME]))
    one_value_only = {"BatchOutput.kind"}
    below = {"SecondaryDevice.kind", "SecondaryDevice.device_id"}  # of ModelInstanceGroup.secondary_devices
    assert every_field() - set_somewhere == set(NOT_CARRIED) | one_value_only | below


def test_a_path_that_no_pod_has_and_a_kind_that_is_open_are_noted_once() -> None:
    text = 'backend: "python" parameters { key: "%s" value { string_value: "%s" } }'
    found = imported(
        folder(text % ("tokenizer_dir", "/opt/tokenizer"), "model.py", name="one"),
        folder(text % ("engine", "/models/two/1"), "model.py", name="two"),
    )
    kind, path = found.notes
    assert kind.startswith("one, two: instance_group says no kind; Triton would take a GPU where there is one")
    assert path.startswith('one: the parameter tokenizer_dir names "/opt/tokenizer", which no pod has')


SPACED = """
input { name: "a" data_type: TYPE_FP32 dims: 1 }
output { name: "c" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling { step { model_name: "b" model_namespace: "n" input_map { key: "in" value: "a" }
  output_map { key: "out" value: "c" } } }
"""


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('instance_group { host_policy: "numa" }', "instance_group[0].host_policy"),
        (
            "instance_group { secondary_devices { kind: KIND_NVDLA device_id: 1 } }",
            "instance_group[0].secondary_devices[0]",
        ),
        (SPACED, "ensemble_scheduling.step[0].model_namespace"),
    ],
    ids=["host_policy", "secondary_devices", "model_namespace"],
)
def test_what_no_spec_can_hold_is_named(text: str, field: str) -> None:
    member = 'backend: "python"\ninput { name: "in" data_type: TYPE_FP32 dims: 1 }\noutput { name: "out" data_type: '
    folders = [folder(text, "model.onnx")]
    if "ensemble" in text:
        folders.append(folder(f"{member}TYPE_FP32 dims: 1 }}", "model.py", name="b"))
    found = imported(*folders)
    assert [difference.field for difference in found.differences] == [field]


# --- the normal form


def test_the_normal_form_of_a_normal_form_is_itself() -> None:
    for seed in range(200):
        once = normal_form(random_config(seed), NAME, "ONNX", gpu=True)
        assert normal_form(once, NAME, "ONNX", gpu=True) == once


def test_a_change_of_any_field_is_seen_by_the_comparison() -> None:
    for seed in range(300):
        config = random_config(seed)
        for item, _ in config.ListFields():
            other = copy.deepcopy(config)
            other.ClearField(item.name)
            assert {change.path.partition("[")[0].partition(".")[0] for change in changes(config, other)} == {item.name}
        assert list(changes(config, copy.deepcopy(config))) == []


def test_what_is_switched_on_by_its_mere_presence_is_not_normalized_away() -> None:
    for text in ("dynamic_batching { }", "sequence_batching { }", "optimization { input_pinned_memory { } }"):
        config = parse_config(f'backend: "onnxruntime" max_batch_size: 4 {text}')
        assert normal_form(config, NAME, "ONNX", gpu=True) != normal_form(
            parse_config('backend: "onnxruntime" max_batch_size: 4'), NAME, "ONNX", gpu=True
        )


# --- the service around the models


GROUP = 'backend: "onnxruntime"\ninstance_group [ {{ {} }} ]'


@pytest.mark.parametrize(
    ("group", "count"),
    [
        ("kind: KIND_CPU", 0), ("kind: KIND_GPU", 1), ("kind: KIND_AUTO", 1), ("", 1), ("kind: KIND_MODEL", 1),
        ("kind: KIND_GPU gpus: [ 0, 3 ]", 4),
    ],
)  # fmt: skip
def test_the_accelerators_are_those_that_the_instance_groups_ask_for(group: str, count: int) -> None:
    assert imported(folder(GROUP.format(group), "model.onnx")).service["spec"]["accelerator"] == {"count": count}


def test_instances_of_no_kind_go_to_the_cpu_in_a_service_without_accelerators() -> None:
    found = imported(folder(GROUP.format("count: 2"), "model.onnx"), accelerators=0)
    (group,) = rendered(found.service)[NAME].instance_group
    assert (group.kind, group.count) == (pb.ModelInstanceGroup.KIND_CPU, 2)
    assert found.differences == []


def test_instances_of_no_kind_are_written_as_gpu_and_it_is_said() -> None:
    found = imported(folder(None, "model.onnx"))
    assert any("--accelerators=0" in said for said in found.notes)


def test_what_a_model_needs_of_the_server_is_there() -> None:
    cached = imported(folder('backend: "onnxruntime" response_cache { enable: true }', "model.onnx"))
    assert "responseCache" in cached.service["spec"]["runtime"]
    short = imported(
        folder("max_batch_size: 1 dynamic_batching { default_queue_policy { max_queue_size: 4 } }", "m.onnx")
    )
    assert short.service["spec"]["scaling"] == {"queueDepth": {"target": 2}}


def test_a_missing_label_file_is_noted() -> None:
    text = 'backend: "onnxruntime" output { name: "y" data_type: TYPE_FP32 dims: 1 label_filename: "labels.txt" }'
    assert any("labels.txt" in said for said in imported(folder(text, "model.onnx")).notes)
    assert not any("labels.txt" in said for said in imported(folder(text, "model.onnx", beside=["labels.txt"])).notes)


ENSEMBLE = """
platform: "ensemble"
input [ { name: "a" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "b" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [ { model_name: "inner" model_version: -1 input_map { key: "in" value: "a" }
  output_map { key: "out" value: "b" } } ] }
"""


def test_an_ensemble_whose_member_is_missing_is_left_out_and_the_rest_is_imported() -> None:
    found = imported(folder(ENSEMBLE, name="outer"), folder('backend: "python"', "model.py", name="other"))
    assert [model["name"] for model in found.service["spec"]["models"]] == ["other"]
    (difference,) = found.differences
    assert (difference.model, difference.field) == ("outer", "the whole model")
    assert "inner" in difference.words


def test_models_go_together_as_far_as_ensembles_join_them() -> None:
    folders = [
        folder('backend: "python"', "model.py", name="alone"),
        folder('backend: "python"', "model.py", name="inner"),
        folder(ENSEMBLE, name="one"),
        folder(ENSEMBLE, name="two"),
    ]
    assert [[each.name for each in group] for group in related(folders)] == [["alone"], ["inner", "one", "two"]]


def test_a_repository_that_no_service_can_hold_is_told_what_to_do() -> None:
    with pytest.raises(NotImportableError, match=r"holds 17 models .* add --each"):
        imported(*(folder(None, "model.onnx", name=f"m{number}") for number in range(17)))


def test_a_model_whose_name_a_service_can_t_have_is_left_out() -> None:
    found = imported(folder(None, "model.onnx", name="_odd"), folder(None, "model.onnx", name="even"))
    assert [(difference.model, difference.field) for difference in found.differences] == [("_odd", "the whole model")]
    with pytest.raises(NotImportableError, match="no model can be carried"):
        imported(folder(None, "model.onnx", name="_odd"))


# --- what can't be read


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('max_batch_size: 8\nbacked: "python"', 2, 'no field named "backed"'),
        ("max_batch_size: many", 1, "many"),
        ('input [\n  { name: "x" data_type: FP32 } ]', 2, "has no value named FP32; write TYPE_FP32"),
        ('input [ { name: "x" }', 1, ""),
        ("max_batch_size: 4\nmax_batch_size: 8", 2, "max_batch_size"),
        ("max_batch_size: ${triton_max_batch_size}", 1, "fill the template first"),
        ('backend: "python\n', 1, ""),
    ],
)  # fmt: skip
def test_a_configuration_that_can_t_be_parsed_is_told_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(UnreadableConfigError) as caught:
        parse_config(text)
    assert caught.value.line == line
    assert says in str(caught.value)


def test_the_documentation_says_of_every_field_where_it_goes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "fields.md").read_text()
    assert text.endswith(f"\n\n{field_table()}"), "replace the table of docs/fields.md by what field_table() gives"
