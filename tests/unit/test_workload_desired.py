"""All children together: names, owners, order, and how a live child is compared with a wanted one."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import kubernetes.client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from child_makers import make_live, make_wanted
from conch import names
from conch.api.fields import canonical_quantity
from conch.workload.desired import digest, first_difference
from makers import SHA256, make_model, make_service, stored

Path = tuple[str | int, ...]

EVERY_FIELD: dict[str, Any] = {
    "models": [
        make_model(name="a", maxBatchSize=8, batching={"preferredSizes": [4]}, parameters={"k": "v"}),
        make_model(name="b", source={"uri": "image://registry.example/m:1#/model.onnx"}),
        make_model(name="c", source={"uri": "https://models.example/m.onnx", "digest": SHA256}),
    ],
    "accelerator": {"count": 2, "products": ["NVIDIA-L4"]},
    "placement": {
        "nodeSelector": {"pool": "1"},
        "tolerations": [{"key": "pool", "value": "gpu"}, {"operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    },
}


def full_service(fields: dict[str, Any] | None = None) -> dict[str, Any]:
    return stored(make_service(fields, **EVERY_FIELD))


def leaves(value: Any, path: Path = ()) -> list[Path]:
    """Paths to everything that isn't a filled dict or list."""
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [path]


def at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


ALL_LEAVES = [
    (child, path)
    for child, wanted in make_wanted(full_service()).items()
    for path in leaves(wanted)
    # Altering these asks for another object, or makes the item another one of a list matched by name.
    if path[0] not in {"apiVersion", "kind"}
]


# --- names


@pytest.mark.parametrize("service", ["a", "resnet", "a" * 45, "a-" * 22 + "a"])
def test_r5_every_name_is_a_dns_label_of_at_most_63_characters(service: str) -> None:
    for child in make_wanted(stored(make_service(name=service))).values():
        name = child["metadata"]["name"]
        assert len(name) <= 63
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
        assert all(len(value) <= 63 for value in child["metadata"]["labels"].values())


def test_r5_all_children_but_the_users_service_carry_a_suffix_of_their_kind() -> None:
    assert list(make_wanted(stored(make_service()))) == [
        "ServiceAccount vision-identity",
        "NetworkPolicy vision-network",
        "Deployment vision-server",
        "Service vision",
        "Service vision-replicas",
        "PodDisruptionBudget vision-disruption",
        "PodMonitor vision-metrics",
    ]


def test_r5_a_pod_name_keeps_room_for_its_hashes() -> None:
    # Deployment name, "-" and a hash of 10, "-" and 5 characters; beyond 63 they are cut and may meet.
    assert len(names.deployment("a" * names.MAX_SERVICE_NAME)) + 17 <= 253


# --- owners, labels, order


def test_r4_owners_do_not_block_deletion() -> None:
    service = full_service()
    for child in make_wanted(service).values():
        assert child["metadata"]["ownerReferences"] == [
            {
                "apiVersion": "conch.dev/v1alpha1",
                "kind": "InferenceService",
                "name": "vision",
                "uid": "uid-1",
                "controller": True,
            }
        ]
        assert "finalizers" not in child["metadata"]


def test_every_child_lives_beside_its_service_and_is_labelled() -> None:
    for child in make_wanted(full_service()).values():
        assert child["metadata"]["namespace"] == "default"
        assert child["metadata"]["labels"] == names.child_labels("vision")


@given(
    with_monitor=st.booleans(),
    models=st.lists(st.sampled_from(range(3)), min_size=1, max_size=3, unique=True),
)
def test_identity_and_policy_come_before_the_pods_and_the_rest_after(models: list[int], *, with_monitor: bool) -> None:
    chosen = [EVERY_FIELD["models"][index] for index in models]
    service = stored(make_service(models=chosen))
    kinds = [child["kind"] for child in make_wanted(service, with_pod_monitor=with_monitor).values()]
    assert kinds.index("ServiceAccount") < kinds.index("Deployment")
    assert kinds.index("NetworkPolicy") < kinds.index("Deployment")
    assert kinds.count("Deployment") == 1
    assert ("PodMonitor" in kinds) is with_monitor


def test_selectors_meet_the_pods_labels() -> None:
    children = make_wanted(full_service())
    labels = children["Deployment vision-server"]["spec"]["template"]["metadata"]["labels"]
    assert children["Deployment vision-server"]["spec"]["selector"]["matchLabels"] == labels
    assert children["Service vision"]["spec"]["selector"] == labels
    assert children["Service vision-replicas"]["spec"]["selector"] == labels
    for name in ("PodDisruptionBudget vision-disruption", "PodMonitor vision-metrics"):
        assert children[name]["spec"]["selector"] == {"matchLabels": labels}
    assert children["NetworkPolicy vision-network"]["spec"]["podSelector"] == {"matchLabels": labels}


def test_named_ports_exist_in_the_triton_container() -> None:
    children = make_wanted(full_service())
    pod = children["Deployment vision-server"]["spec"]["template"]["spec"]
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    for name in ("Service vision", "Service vision-replicas"):
        for port in children[name]["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    for endpoint in children["PodMonitor vision-metrics"]["spec"]["podMetricsEndpoints"]:
        assert ports[endpoint["port"]] == 8002


def test_clients_see_http_and_grpc_and_the_replicas_service_has_the_metrics_too() -> None:
    children = make_wanted(full_service())
    clients = {p["name"]: p for p in children["Service vision"]["spec"]["ports"]}
    replicas = {p["name"]: p for p in children["Service vision-replicas"]["spec"]["ports"]}
    assert {name: port["port"] for name, port in clients.items()} == {"http": 8000, "grpc": 8001}
    assert {name: port["port"] for name, port in replicas.items()} == {"http": 8000, "grpc": 8001, "metrics": 8002}
    # Without it a mesh or a gateway speaks HTTP/1.1 to the gRPC port.
    assert clients["grpc"]["appProtocol"] == replicas["grpc"]["appProtocol"] == "kubernetes.io/h2c"
    assert children["Service vision-replicas"]["spec"]["clusterIP"] == "None"
    assert "clusterIP" not in children["Service vision"]["spec"]


def test_a_mesh_never_sees_pods_before_they_are_ready_through_the_clients_service() -> None:
    for name in ("Service vision", "Service vision-replicas"):
        assert "publishNotReadyAddresses" not in make_wanted(full_service())[name]["spec"]


def test_r13_one_pod_at_a_time_and_sick_pods_always_may_go() -> None:
    budget = make_wanted(full_service())["PodDisruptionBudget vision-disruption"]
    assert budget["apiVersion"] == "policy/v1"
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert "minAvailable" not in budget["spec"]


# --- nothing that the server would answer differently


@pytest.mark.parametrize("child", list(make_wanted(full_service())))
def test_row_55_row_57_a_server_s_defaults_are_no_difference(child: str) -> None:
    service = full_service()
    live = {name: make_live(wanted) for name, wanted in make_wanted(service).items()}
    again = make_wanted(service, live=live["Deployment vision-server"])
    assert first_difference(live[child], again[child]) is None


@pytest.mark.parametrize("child", list(make_wanted(full_service())))
def test_nothing_is_sent_that_the_server_leaves_out(child: str) -> None:
    wanted = make_wanted(full_service())[child]
    empty = [path for path in leaves(wanted) if at(wanted, path) in ("", None, [], {})]
    assert [path for path in empty if path[-1] != "emptyDir"] == []


@pytest.mark.parametrize(
    "overrides",
    [
        {"resources.cpu": "0.5", "resources.memory": "2048Mi", "runtime.sharedMemory": "1024Mi"},
        {"resources.cpu": "1000m", "resources.memory": "5000M"},
        {"resources.cpu": "1.50", "resources.memory": "4.5Gi"},
    ],
)
def test_quantities_are_sent_as_the_server_stores_them(overrides: dict[str, str]) -> None:
    wanted = make_wanted(stored(make_service(overrides)))["Deployment vision-server"]
    found = [path for path in leaves(wanted) if {"requests", "limits", "sizeLimit"} & set(path)]
    assert len(found) >= 7
    for path in found:
        assert at(wanted, path) == canonical_quantity(at(wanted, path))


@pytest.mark.parametrize(
    ("live", "wanted"), [("500m", "0.5"), ("1", "1000m"), ("1Gi", "1024Mi"), ("1k", "1000"), ("2", "2.0")]
)
@pytest.mark.parametrize("where", ["requests", "limits"])
def test_equal_amounts_written_differently_are_no_difference(live: str, wanted: str, where: str) -> None:
    assert first_difference({"resources": {where: {"cpu": live}}}, {"resources": {where: {"cpu": wanted}}}) is None
    assert first_difference({"emptyDir": {"sizeLimit": live}}, {"emptyDir": {"sizeLimit": wanted}}) is None


def test_other_amounts_are_a_difference() -> None:
    live, wanted = {"resources": {"requests": {"cpu": "501m"}}}, {"resources": {"requests": {"cpu": "0.5"}}}
    assert first_difference(live, wanted) == "resources.requests.cpu"


@pytest.mark.parametrize(("live", "wanted"), [("1", "1.0"), ("1000m", "1"), (1, "1"), (True, 1), (0, False)])
def test_texts_that_only_look_like_equal_amounts_differ(live: Any, wanted: Any) -> None:
    assert first_difference({"nodeSelector": {"pool": live}}, {"nodeSelector": {"pool": wanted}}) == "nodeSelector.pool"


@pytest.mark.parametrize("child", [name for name in make_wanted(full_service()) if not name.startswith("PodMonitor")])
def test_every_field_is_one_of_the_kubernetes_api(child: str) -> None:
    wanted = make_wanted(full_service())[child]
    assert unknown_fields(wanted, f"V1{wanted['kind']}") == []


def unknown_fields(value: Any, type_: str, path: str = "") -> list[str]:
    """Fields and types that the API's published models don't have."""
    if type_.startswith("List["):
        wrong = [] if isinstance(value, list) else [f"{path} is no list"]
        return wrong or [f for i, item in enumerate(value) for f in unknown_fields(item, type_[5:-1], f"{path}[{i}]")]
    if type_.startswith("Dict["):
        inner = type_[5:-1].partition(", ")[2]
        return [fault for key, item in value.items() for fault in unknown_fields(item, inner, f"{path}.{key}")]
    plain: Any = {"str": str, "int": int, "bool": bool, "object": (int, str)}.get(type_)
    if plain is not None:
        right = isinstance(value, plain) and (type_ == "bool" or not isinstance(value, bool))
        return [] if right else [f"{path}: {value!r} is no {type_}"]
    model = getattr(kubernetes.client, type_)
    fields = {wire: model.openapi_types[name] for name, wire in model.attribute_map.items()}
    return [
        fault
        for key, item in value.items()
        for fault in (unknown_fields(item, fields[key], f"{path}.{key}") if key in fields else [f"{path}.{key}"])
    ]


# --- drift


@pytest.mark.parametrize("child", list(make_wanted(full_service())))
def test_an_object_does_not_differ_from_itself(child: str) -> None:
    wanted = make_wanted(full_service())[child]
    assert first_difference(wanted, copy.deepcopy(wanted)) is None


@pytest.mark.parametrize(("child", "path"), ALL_LEAVES, ids=lambda part: str(part).replace(" ", "")[:80])
def test_r8_a_hand_edit_of_any_field_is_found_although_the_digest_stays(child: str, path: Path) -> None:
    wanted = make_wanted(full_service())[child]
    for edit in (lambda _: "edited", lambda _: None, lambda old: [old]):
        live = make_live(wanted)
        at(live, path[:-1])[path[-1]] = edit(at(live, path))
        assert first_difference(live, wanted) is not None
    live = make_live(wanted)
    del at(live, path[:-1])[path[-1]]
    assert first_difference(live, wanted) is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.lists(st.fixed_dictionaries({"name": st.sampled_from("abc"), "value": inner}), max_size=3)
    ),
    max_leaves=20,
)


@given(JSON)
def test_nothing_differs_from_itself(value: Any) -> None:
    assert first_difference(value, copy.deepcopy(value)) is None


@given(JSON, st.dictionaries(st.text(min_size=5, max_size=8), JSON, max_size=3))
def test_fields_that_others_added_are_no_difference(value: Any, added: dict[str, Any]) -> None:
    assert first_difference({**added, "x": value}, {"x": value}) is None


@given(JSON, st.data())
def test_any_changed_leaf_of_any_object_is_found(value: Any, data: st.DataObject) -> None:
    wanted = {"x": value}
    live = copy.deepcopy(wanted)
    path = data.draw(st.sampled_from(leaves(wanted)))
    if "name" in path or _has_namesakes(value):
        return
    at(live, path[:-1])[path[-1]] = {"other": at(live, path)}
    if at(wanted, path) != {}:
        assert first_difference(live, wanted) is not None


def _has_namesakes(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_namesakes(item) for item in value.values())
    if isinstance(value, list):
        found = [json.dumps(item["name"]) for item in value if isinstance(item, dict) and "name" in item]
        return len(found) != len(set(found)) or any(_has_namesakes(item) for item in value)
    return False


@pytest.mark.parametrize(
    ("live", "wanted", "path"),
    [
        ({}, {"spec": {"ports": []}}, "spec"),
        ({"spec": 3}, {"spec": {"a": 1}}, "spec"),
        ({"spec": {"ports": 3}}, {"spec": {"ports": [1]}}, "spec.ports"),
        ({"l": [1]}, {"l": [1, 2]}, "l"),
        ({"l": [1, 3]}, {"l": [1, 2]}, "l[1]"),
        ({"l": [{"a": 1}, {"a": 3}]}, {"l": [{"a": 1}, {"a": 2}]}, "l[1].a"),
        ({"l": [{"name": "y", "v": 1}]}, {"l": [{"name": "x", "v": 1}]}, "l[x]"),
        ({"l": [{"name": "x", "v": 2}]}, {"l": [{"name": "x", "v": 1}]}, "l[x].v"),
        ({"l": [{"name": "y"}, {"name": "x", "v": 1}]}, {"l": [{"name": "x", "v": 1}]}, None),
        ({"l": [{"name": "x", "v": 1}, {"name": "x", "v": 2}]}, {"l": [{"name": "x", "v": 1}]}, None),
        ({"a": 1, "b": 2}, {"a": 1}, None),
    ],
)
def test_a_difference_is_named_by_its_path(live: Any, wanted: Any, path: str | None) -> None:
    assert first_difference(live, wanted) == path


def test_another_owner_of_the_same_name_is_no_difference() -> None:
    wanted = make_wanted(full_service())["Service vision"]
    live = make_live(wanted)
    live["metadata"]["ownerReferences"].append({"kind": "Other", "name": "vision", "uid": "u2"})
    assert first_difference(live, wanted) is None


def test_r8_a_dropped_field_alters_the_digest() -> None:
    before = make_wanted(full_service())["Deployment vision-server"]
    after = make_wanted(full_service({"placement.priorityClassName": None}))["Deployment vision-server"]
    assert digest_of(before) != digest_of(after)
    # The annotation is a wanted value itself, so the field that only the live object has is found.
    assert first_difference(make_live(before), after) is not None


def test_r8_the_digest_is_of_what_is_sent_without_itself() -> None:
    for child in make_wanted(full_service()).values():
        bare = copy.deepcopy(child)
        del bare["metadata"]["annotations"][names.DESIRED_ANNOTATION]
        if not bare["metadata"]["annotations"]:
            del bare["metadata"]["annotations"]
        assert digest_of(child) == digest(bare)


def test_equal_services_give_equal_children_in_whatever_order_the_fields_come() -> None:
    service = full_service()
    turned = {**service, "spec": dict(reversed(list(service["spec"].items())))}
    assert {k: digest_of(v) for k, v in make_wanted(service).items()} == {
        k: digest_of(v) for k, v in make_wanted(turned).items()
    }


def digest_of(child: dict[str, Any]) -> str:
    return str(child["metadata"]["annotations"][names.DESIRED_ANNOTATION])
