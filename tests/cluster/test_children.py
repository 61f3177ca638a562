"""Drift, changes in mid-flight, what the status says and whose objects are whose: one service on a real API server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from apiserver import ApiServer, Refused, condition
from stories import (
    CHILDREN,
    create,
    edit_port,
    images,
    left,
    made,
    missing,
    port_is_back,
    replicas,
    served,
    settled,
    told,
    until,
    versions,
)

from conch import names
from conch.kube.client import DEPLOYMENTS, INFERENCE_SERVICES, NETWORK_POLICIES, SERVICES, Resource

if TYPE_CHECKING:
    from collections.abc import Callable

    from fault_proxy import FaultProxy

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("leader")]

# --- drift


def edit_image(api: ApiServer, namespace: str) -> None:
    edit = [{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "example.com/other:1"}]
    api.edit(DEPLOYMENTS, namespace, names.deployment("vision"), edit)


def edit_policy(api: ApiServer, namespace: str) -> None:
    edit = [{"op": "replace", "path": "/spec/policyTypes", "value": ["Ingress"]}]
    api.edit(NETWORK_POLICIES, namespace, names.network_policy("vision"), edit)


def remove_all_labels(api: ApiServer, namespace: str) -> None:
    api.edit(DEPLOYMENTS, namespace, names.deployment("vision"), [{"op": "remove", "path": "/metadata/labels"}])


def remove_service_label(api: ApiServer, namespace: str) -> None:
    edit = {"metadata": {"labels": {names.SERVICE_LABEL: None}}}
    api.edit(NETWORK_POLICIES, namespace, names.network_policy("vision"), edit)


def image_is_back(api: ApiServer, namespace: str) -> bool:
    deployment = api.deployment(namespace, "vision")
    return deployment is not None and images(deployment)[names.SERVER_CONTAINER] != "example.com/other:1"


def policy_is_back(api: ApiServer, namespace: str) -> bool:
    policy = api.get(NETWORK_POLICIES, namespace, names.network_policy("vision"))
    return bool(policy["spec"]["policyTypes"] == ["Ingress", "Egress"])


def labels_are_back(resource: Resource, name: str) -> Callable[[ApiServer, str], bool]:
    def back(api: ApiServer, namespace: str) -> bool:
        labels = api.get(resource, namespace, name)["metadata"].get("labels") or {}
        return names.child_labels("vision").items() <= labels.items()

    return back


DRIFT = [
    ("a Service's port", edit_port, port_is_back, "Put back Service vision: spec.ports[http].port."),
    (
        "a Deployment's image",
        edit_image,
        image_is_back,
        "Put back Deployment vision-server: spec.template.spec.containers[triton].image.",
    ),
    ("a NetworkPolicy", edit_policy, policy_is_back, "Put back NetworkPolicy vision-network: spec.policyTypes."),
    (
        "one label of a NetworkPolicy",
        remove_service_label,
        labels_are_back(NETWORK_POLICIES, "vision-network"),
        "Put back NetworkPolicy vision-network: metadata.labels.conch.dev/service.",
    ),
    (
        "all labels of a Deployment",
        remove_all_labels,
        labels_are_back(DEPLOYMENTS, "vision-server"),
        "Put back Deployment vision-server: metadata.labels.",
    ),
]


@pytest.mark.parametrize(("what", "edit", "is_back", "message"), DRIFT, ids=[row[0] for row in DRIFT])
def test_r8_row_42_a_hand_edit_is_put_back_and_the_event_names_the_field(
    api: ApiServer,
    namespace: str,
    *,
    what: str,
    edit: Callable[[ApiServer, str], None],
    is_back: Callable[[ApiServer, str], bool],
    message: str,
) -> None:
    made(api, namespace, {"scaling.minReplicas": 2})
    edit(api, namespace)
    until(f"{what} to be put back", lambda: is_back(api, namespace))
    until("the event", lambda: message in api.events(namespace, "DriftRepaired"))
    assert replicas(api, namespace) == 2


def test_every_child_deleted_by_hand_comes_back(api: ApiServer, namespace: str) -> None:
    made(api, namespace, {"scaling.minReplicas": 3})
    before = {
        (resource.kind, child("vision")): api.get(resource, namespace, child("vision"))["metadata"]["uid"]
        for resource, child in CHILDREN
    }
    for resource, child in CHILDREN:
        api.delete(resource, namespace, child("vision"))

    def all_new() -> bool:
        found = {
            (resource.kind, child("vision")): api.get(resource, namespace, child("vision"))["metadata"]["uid"]
            for resource, child in CHILDREN
        }
        return all(found[key] != uid for key, uid in before.items())

    until("new children", all_new)
    assert replicas(api, namespace) == 3


# --- changes in mid-flight


@pytest.mark.parametrize("slow", ["inferenceservices/status", "networkpolicies", "deployments"])
def test_a_spec_change_in_the_middle_of_a_reconcile_ends_at_the_last_spec(
    api: ApiServer, namespace: str, proxy: FaultProxy, slow: str
) -> None:
    with proxy.fault(verb="patch", resource=slow, namespace=namespace, delay_s=1.0) as fault:
        create(api, namespace, {"runtime.image": "example.com/triton:1"})
        until("the slow write", lambda: fault.hits)
        create(api, namespace, {"runtime.image": "example.com/triton:2"})
        time.sleep(0.5)
        create(api, namespace, {"runtime.image": "example.com/triton:3"})

    def is_last() -> bool:
        deployment = api.deployment(namespace, "vision")
        return deployment is not None and images(deployment)[names.SERVER_CONTAINER] == "example.com/triton:3"

    until("the last spec", is_last)
    service = settled(api, namespace)
    assert service["status"]["observedGeneration"] == service["metadata"]["generation"] == 3


# --- what the status says (kstatus), and who writes what


def test_r10_row_58_row_59_row_60_the_status_means_what_kstatus_reads(
    api: ApiServer, namespace: str, proxy: FaultProxy
) -> None:
    mark = proxy.mark()
    service = made(api, namespace)
    first = next(asked for asked in proxy.writes(mark, namespace=namespace) if "status" in asked.resource)
    seen = {item["type"]: item["status"] for item in first.body["status"]["conditions"]}
    # Before any slow work: in progress, of this generation.
    assert first.body["status"]["observedGeneration"] == 1
    assert seen["Reconciling"] == "True"
    assert not any(asked.resource == "deployments" and asked.at < first.at for asked in proxy.writes(mark))
    # No pod answers: in progress, neither ready nor failed.
    assert condition(service, "Ready")["status"] == "False"
    assert condition(service, "Reconciling")["status"] == "True"
    assert condition(service, "Stalled")["status"] == "False"
    # Served: current.
    service = served(api, namespace)
    assert condition(service, "Ready")["status"] == "True"
    assert condition(service, "Reconciling")["status"] == "False"
    assert service["status"]["observedGeneration"] == 1
    assert service["status"]["replicas"]["summary"] == "1/1"
    # More replicas are no rollout; the second one is not ready.
    create(api, namespace, {"scaling.minReplicas": 2})
    service = until("both replicas", lambda: with_summary(api, namespace, "1/2"))
    assert condition(service, "Ready")["status"] == "True"
    # A new template is one: the old pods answer while it rolls, of the generation that they serve.
    create(api, namespace, {"scaling.minReplicas": 2, "runtime.image": "example.com/triton:2"})
    service = until("the rollout to be told", lambda: rolling(api, namespace))
    assert service["status"]["observedGeneration"] == 3
    assert condition(service, "Ready")["status"] == "True"
    assert condition(service, "Ready")["observedGeneration"] == 2
    service = served(api, namespace)
    assert condition(service, "Ready")["observedGeneration"] == 3


def with_summary(api: ApiServer, namespace: str, summary: str) -> Any:
    service = told(api.service(namespace, "vision"))
    settled_too = service is not None and condition(service, "Reconciling")["status"] == "False"
    return service if service and settled_too and service["status"]["replicas"]["summary"] == summary else None


def rolling(api: ApiServer, namespace: str) -> Any:
    service = told(api.service(namespace, "vision"))
    return service if service and condition(service, "Ready")["reason"] == "RollingOut" else None


def test_row_40_the_spec_is_never_written(api: ApiServer, namespace: str) -> None:
    created = create(api, namespace)
    service = settled(api, namespace)
    assert service["spec"] == created["spec"]
    assert service["metadata"]["generation"] == 1
    for entry in service["metadata"]["managedFields"]:
        if entry["manager"] != "gitops":
            assert (entry["manager"], entry.get("subresource")) == (names.STATUS_MANAGER, "status")
            assert set(entry["fieldsV1"]) == {"f:status"}
    assert "finalizers" not in service["metadata"]
    assert "annotations" not in service["metadata"]


def test_row_41_conditions_are_made_anew_and_none_sticks(api: ApiServer, namespace: str) -> None:
    create(api, namespace, paused=True)
    until("the pause", lambda: condition(api.service(namespace, "vision"), "Ready").get("reason") == "Paused")
    assert left(api, namespace, "vision") == []
    create(api, namespace)
    settled(api, namespace)

    def no_pause_told() -> bool:
        conditions = api.service(namespace, "vision")["status"]["conditions"]
        return not any(item["reason"] == "Paused" for item in conditions)

    until("no condition to tell of the pause", no_pause_told)
    create(api, namespace, paused=True)
    until("the pause", lambda: condition(api.service(namespace, "vision"), "Reconciling").get("reason") == "Paused")
    edit_port(api, namespace)
    time.sleep(2)
    assert not port_is_back(api, namespace)
    create(api, namespace)
    until("the port to be put back", lambda: port_is_back(api, namespace))


def test_a_spec_that_got_past_the_schema_leaves_the_children_as_they_are(api: ApiServer, namespace: str) -> None:
    """The CRD's rules are taken away for a moment, as if the spec had been stored before they existed."""
    made(api, namespace)
    served(api, namespace)
    before = versions(api, namespace, [resource for resource, _ in CHILDREN])
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.SERVICE_PLURAL}.{names.GROUP}"
    strict = api.call("GET", path)
    try:
        api.call("PATCH", path, crd_without_rules(strict), "application/merge-patch+json")

        def stored() -> bool:
            try:
                edit = [{"op": "replace", "path": "/spec/models/0/source/uri", "value": "ftp://example.com/x"}]
                api.edit(INFERENCE_SERVICES, namespace, "vision", edit)
            except Refused:
                return False
            return True

        until("the rules to be off", stored)
    finally:
        api.call("PATCH", path, {"spec": {"versions": strict["spec"]["versions"]}}, "application/merge-patch+json")
    service = until("the refusal", lambda: stalled(api, namespace))
    assert condition(service, "Stalled")["reason"] == "InvalidSpec"
    assert "spec.models[0].source.uri" in condition(service, "Stalled")["message"]
    assert condition(service, "Ready")["status"] == "True"
    assert versions(api, namespace, [resource for resource, _ in CHILDREN]) == before

    def rules_are_back() -> bool:
        try:
            create(api, namespace, {"models[0].source.uri": "ftp://example.com/y"})
        except Refused:
            return True
        return False

    until("the rules to be on again", rules_are_back)
    create(api, namespace)
    until("the end of the stall", lambda: condition(api.service(namespace, "vision"), "Stalled")["status"] == "False")


def stalled(api: ApiServer, namespace: str) -> Any:
    service = api.service(namespace, "vision")
    return service if condition(service, "Stalled").get("status") == "True" else None


def crd_without_rules(crd: Any) -> dict[str, Any]:
    def without(here: Any) -> Any:
        if isinstance(here, dict):
            dropped = {"x-kubernetes-validations", "pattern"}
            return {
                key: without(value)
                for key, value in here.items()
                if not (key in dropped and isinstance(value, list | str))
            }
        return [without(item) for item in here] if isinstance(here, list) else here

    return {"spec": {"versions": without(crd["spec"]["versions"])}}


# --- whose objects


def test_r5_a_users_service_of_the_same_name_is_neither_taken_nor_deleted(api: ApiServer, namespace: str) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "vision", "namespace": namespace},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
    }
    before = api.create(theirs)["metadata"]["resourceVersion"]
    create(api, namespace)
    service = until("the conflict", lambda: stalled(api, namespace))
    assert condition(service, "Stalled")["reason"] == "NameConflict"
    message = "Service vision exists and isn't Conch's: rename metadata.name, or delete the Service."
    assert condition(service, "Stalled")["message"] == message
    assert left(api, namespace, "vision") == ["Service vision"]
    api.delete(INFERENCE_SERVICES, namespace, "vision")
    until("the deletion", lambda: api.find(INFERENCE_SERVICES, namespace, "vision") is None)
    time.sleep(2)
    kept = api.clients_service(namespace, "vision")
    assert kept is not None
    assert kept["metadata"]["resourceVersion"] == before


def test_r6_only_what_is_ours_is_pruned(api: ApiServer, namespace: str) -> None:
    service = made(api, namespace)
    metadata = service["metadata"]
    owner = {
        "apiVersion": service["apiVersion"],
        "kind": service["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }

    def leftover(name: str, **more: Any) -> None:
        api.create(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {
                    "name": name, "namespace": namespace, "labels": names.child_labels("vision"), **more
                },
                "spec": {"ports": [{"port": 80}]},
            }
        )  # fmt: skip

    leftover("labelled-only")
    leftover("owned-by-many", ownerReferences=[{**owner, "controller": False}])
    leftover("of-an-older-version", ownerReferences=[owner])
    until("the old child to go", lambda: api.find(SERVICES, namespace, "of-an-older-version") is None)
    until(
        "the event",
        lambda: "Removed Service of-an-older-version, which is no longer wanted." in api.events(namespace, "Pruned"),
    )
    assert api.find(SERVICES, namespace, "labelled-only") is not None
    assert api.find(SERVICES, namespace, "owned-by-many") is not None
    assert missing(api, namespace, "vision") == []


# --- what users run


def test_row_55_applying_again_and_diffing_shows_nothing(api: ApiServer, namespace: str) -> None:
    kubectl = [api.region.layout.binary("kubectl"), "-n", namespace]
    sample = "manifests/samples/filetype.yaml"
    api.region.run([*kubectl, "apply", "-f", sample])
    settled(api, namespace, "filetype")
    before = api.service(namespace, "filetype")
    api.region.run([*kubectl, "apply", "-f", sample])
    after = api.service(namespace, "filetype")
    assert (after["metadata"]["generation"], after["spec"]) == (1, before["spec"])
    by_server = ["--server-side", "--field-manager=gitops", "--force-conflicts"]
    for options in ([], by_server):
        shown = api.region.run([*kubectl, "diff", *options, "-f", sample], check=False)
        assert (shown.returncode, shown.stdout) == (0, "")
        api.region.run([*kubectl, "apply", *by_server, "-f", sample])


def test_kubectl_get_shows_readiness_replicas_and_the_reason(api: ApiServer, namespace: str) -> None:
    made(api, namespace)
    head, row = api.region.kubectl("-n", namespace, "get", "cisvc").splitlines()
    assert head.split() == ["NAME", "READY", "REPLICAS", "WAITING", "REASON", "AGE"]
    assert row.split()[:3] == ["vision", "False", "0/1"]
    assert "Starting" in row


def test_kubectl_explain_describes_scaling(api: ApiServer) -> None:
    said = api.region.kubectl("explain", "cisvc.spec.scaling")
    assert "DESCRIPTION:" in said
    for field in ("minReplicas", "maxReplicas", "queueDepth", "scaleDown", "whenMetricsMissing"):
        assert field in said
    assert "<empty>" not in said
