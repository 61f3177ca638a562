"""The operator's role grants exactly the verbs that it uses, and a missing one is named where people look (R15)."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from apiserver import ApiServer, managers
from stories import CHILDREN, create, left, made, replicas, until

from conch import names
from conch.kube.client import (
    DEPLOYMENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    INFERENCE_SERVICES,
    LEASES,
    NETWORK_POLICIES,
    PODS,
    RESOURCE_CLAIM_TEMPLATES,
    SCALED_OBJECTS,
    SERVICES,
)
from operators import NAMESPACE, LocalOperator, manifest_objects

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fault_proxy import FaultProxy, Request

    from conftest import Shared
    from sandbox import Region

pytestmark = pytest.mark.cluster

Right = tuple[str, str, str]
"""Verb, API group, resource."""

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:conch-operator"
ROLES = "/apis/rbac.authorization.k8s.io/v1"
CLUSTER_ROLE = f"{ROLES}/clusterroles/conch-operator"
LEASE_ROLE = f"{ROLES}/namespaces/{NAMESPACE}/roles/conch-operator"
# Granted only so that the operator may grant it on; it makes no roles yet.
GRANTED_ON: frozenset[Right] = frozenset()


def granted() -> set[Right]:
    """What manifests/operator.yaml gives."""
    return {
        (verb, group, resource)
        for role in manifest_objects()
        if role["kind"] in {"ClusterRole", "Role"}
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(asked: list[Request]) -> set[Right]:
    """What the API server checked; an apply that makes an object needs `create` as well as `patch`."""
    found = {(one.verb, one.group, one.resource) for one in asked if one.resource}
    created = {("create", one.group, one.resource) for one in asked if one.verb == "patch" and one.status == 201}
    return found | created


def leftovers_of_an_older_version(api: ApiServer, namespace: str) -> None:
    """A second child of each kind, under another name: what pruning is for."""
    for resource, child in CHILDREN:
        body = copy.deepcopy(api.get(resource, namespace, child("vision")))
        metadata = body["metadata"]
        body["metadata"] = {
            "name": f"old-{metadata['name']}", "namespace": namespace,
            "labels": metadata["labels"], "ownerReferences": metadata["ownerReferences"],
        }  # fmt: skip
        body.pop("status", None)
        for field in ("clusterIP", "clusterIPs"):
            body.get("spec", {}).pop(field, None)
        if body["kind"] == "Deployment":
            body["spec"]["replicas"] = 0
        api.create(body)


def a_claim_and_an_older_one(api: ApiServer, namespace: str) -> None:
    """A service with a claim, and a template that an earlier claim left behind."""
    create(api, namespace, {"accelerator.claim": {"deviceClass": "gpu.example.com"}}, name="claimed")
    (template,) = until("the claim's template", lambda: api.all(RESOURCE_CLAIM_TEMPLATES, namespace))
    until("its pods", lambda: (api.deployment(namespace, "claimed") or {}).get("status", {}).get("updatedReplicas"))
    metadata = template["metadata"]
    kept = {key: metadata[key] for key in ("namespace", "labels", "ownerReferences")}
    api.create({**template, "metadata": {**kept, "name": "old-claim"}})
    until("the older one to go", lambda: len(api.all(RESOURCE_CLAIM_TEMPLATES, namespace)) == 1)
    api.delete(INFERENCE_SERVICES, namespace, "claimed")


def slow_fetch(api: ApiServer, namespace: str) -> None:
    """A pod's init container has run for long, as a kubelet would say; its log can't be had without one."""
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    fetch = {"name": names.FETCH_CONTAINER, "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    status = {"status": {"phase": "Pending", "initContainerStatuses": [{**fetch, "state": running}]}}
    for pod in until("a pod", lambda: api.all(PODS, namespace)):
        api.edit(PODS, namespace, pod["metadata"]["name"], status, sub="status", manager="fake-kubelet")


def scaler(resource: Any, namespace: str) -> dict[str, Any]:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "somebody-elses"}
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": "theirs", "namespace": namespace},
        "spec": {"scaleTargetRef": target, "maxReplicas": 2},
    }


def test_r15_the_role_grants_exactly_the_verbs_that_are_used(
    api: ApiServer, namespace: str, proxy: FaultProxy, no_leader: None, shared: Shared
) -> None:
    del no_leader
    api.delete(LEASES, NAMESPACE, names.LEASE_NAME)
    mark = proxy.mark()
    shared.lead()
    made(api, namespace)
    slow_fetch(api, namespace)
    until("the Event about it", lambda: api.events(namespace, "FetchingModels"))
    edit = [{"op": "replace", "path": "/spec/policyTypes", "value": ["Ingress"]}]
    api.edit(NETWORK_POLICIES, namespace, names.network_policy("vision"), edit)
    until("the repair", lambda: api.events(namespace, "DriftRepaired"))
    leftovers_of_an_older_version(api, namespace)
    until("the pruning", lambda: not any(api.find(kind, namespace, f"old-{of('vision')}") for kind, of in CHILDREN))
    a_claim_and_an_older_one(api, namespace)
    api.create(scaler(HORIZONTAL_POD_AUTOSCALERS, namespace))
    api.create(scaler(SCALED_OBJECTS, namespace))
    create(api, namespace, {"scaling.minReplicas": 2, "runtime.image": "example.com/triton:2"})
    until("the step", lambda: replicas(api, namespace) == 2)
    api.delete(INFERENCE_SERVICES, namespace, "vision")
    until("the end", lambda: not left(api, namespace, "vision"))
    # The Lease is renewed, and a second start finds it there.
    shared.stop()
    shared.lead()
    asked = [one for one in proxy.since(mark) if one.who == "shared"]
    # A namespace that goes away refuses everything; that is no matter of roles.
    assert [one for one in asked if one.status == 403 and one.namespace in {"", namespace, NAMESPACE}] == []
    assert {"used but not granted": used(asked) - granted()} == {"used but not granted": set()}
    assert {"granted but not used": granted() - used(asked) - GRANTED_ON} == {"granted but not used": set()}


# --- one verb less


@contextlib.contextmanager
def without(api: ApiServer, role_path: str, right: Right) -> Iterator[None]:
    """The role without one verb of one resource, until the block ends."""
    role = api.call("GET", role_path)
    rules = [
        {
            **rule,
            "verbs": [verb for verb in rule["verbs"] if (verb, rule["apiGroups"][0], rule["resources"][0]) != right],
        }
        for rule in expanded(role["rules"])
    ]
    assert len(json.dumps(rules)) < len(json.dumps(expanded(role["rules"]))), "the role doesn't grant it anyway"
    api.call("PATCH", role_path, {"rules": [rule for rule in rules if rule["verbs"]]}, "application/merge-patch+json")
    try:
        until("the verb to be gone", lambda: not allowed(api, right))
        yield
    finally:
        api.call("PATCH", role_path, {"rules": role["rules"]}, "application/merge-patch+json")
        until("the verb to be back", lambda: allowed(api, right))


def expanded(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": rule["verbs"]}
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    ]


def allowed(api: ApiServer, right: Right) -> bool:
    verb, group, whole = right
    resource, _, subresource = whole.partition("/")
    where = NAMESPACE if resource == "leases" else ""
    asked = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "namespace": where}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": ACCOUNT, "resourceAttributes": asked},
    }
    return bool(api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)["status"]["allowed"])


def nothing(api: ApiServer, namespace: str) -> None:
    del api, namespace


def create_one(api: ApiServer, namespace: str) -> None:
    create(api, namespace)


def make_one(api: ApiServer, namespace: str) -> None:
    made(api, namespace)


def ask_for_two(api: ApiServer, namespace: str) -> None:
    create(api, namespace, {"scaling.minReplicas": 2})


def claimed(api: ApiServer, namespace: str) -> None:
    made(api, namespace)

    def is_claimed() -> bool:
        deployment = api.get(DEPLOYMENTS, namespace, names.deployment("vision"))
        return names.SCALING_MANAGER in managers(deployment, "spec.replicas")

    until("the handshake", is_claimed)


def edit_policy(api: ApiServer, namespace: str) -> None:
    edit = [{"op": "replace", "path": "/spec/policyTypes", "value": ["Ingress"]}]
    api.edit(NETWORK_POLICIES, namespace, names.network_policy("vision"), edit)


def leave_an_old_child(api: ApiServer, namespace: str) -> None:
    body = copy.deepcopy(api.get(SERVICES, namespace, "vision"))
    metadata = body["metadata"]
    body["metadata"] = {
        "name": "old",
        "namespace": namespace,
        "labels": metadata["labels"],
        "ownerReferences": metadata["ownerReferences"],
    }
    body["spec"] = {"ports": [{"port": 80}]}
    api.create(body)


Step = Callable[[ApiServer, str], None]
WHILE_IT_RUNS: list[tuple[Right, Step, Step]] = [
    (("create", "apps", "deployments"), nothing, create_one),
    (("get", "", "services"), nothing, create_one),
    (("patch", "conch.dev", "inferenceservices/status"), nothing, create_one),
    (("create", "", "events"), make_one, edit_policy),
    (("patch", "networking.k8s.io", "networkpolicies"), make_one, edit_policy),
    (("patch", "apps", "deployments/scale"), claimed, ask_for_two),
    (("delete", "", "services"), make_one, leave_an_old_child),
    (("get", "", "pods/log"), make_one, slow_fetch),
]


@pytest.mark.parametrize(
    ("right", "before", "act"), WHILE_IT_RUNS, ids=[f"{verb} {resource}" for (verb, _, resource), _, _ in WHILE_IT_RUNS]
)
def test_r15_a_verb_that_is_missing_is_named_in_the_status_or_the_log(
    api: ApiServer, namespace: str, shared: Shared, *, right: Right, before: Step, act: Step
) -> None:
    leader = shared.lead()
    before(api, namespace)
    seen = len(leader.log.read_text())
    with without(api, CLUSTER_ROLE, right):
        act(api, namespace)
        words = f'cannot {right[0]} resource "{right[2]}"'

        def named() -> bool:
            status = api.service(namespace, "vision").get("status") or {}
            messages = [condition["message"] for condition in status.get("conditions") or ()]
            log = [line for line in leader.log.read_text()[seen:].splitlines() if line.startswith("{")]
            return any(words in text for text in [*messages, *(str(list(json.loads(line).values())) for line in log)])

        until(f"`{words}` in the status or the log", named)
    assert leader.running()


AT_THE_START: list[tuple[str, Right]] = [
    (CLUSTER_ROLE, ("list", "", "pods")),
    (CLUSTER_ROLE, ("watch", "apps", "deployments")),
    (LEASE_ROLE, ("update", "coordination.k8s.io", "leases")),
]


@pytest.mark.usefixtures("no_leader")
@pytest.mark.parametrize(
    ("role", "right"), AT_THE_START, ids=[f"{verb} {resource}" for _, (verb, _, resource) in AT_THE_START]
)
def test_r15_an_operator_that_starts_without_a_verb_names_it_in_its_log(
    api: ApiServer, control_plane: Region, tmp_path: Path, *, role: str, right: Right
) -> None:
    with without(api, role, right):
        operator = LocalOperator(control_plane, tmp_path, identity="poor")
        try:
            operator.start(wait=False)
            words = f'cannot {right[0]} resource "{right[2]}"'
            until(f"`{words}` in the log", lambda: words in operator.log.read_text().replace("\\", ""))
        finally:
            operator.stop()
