"""Which connections the NetworkPolicy lets through, judged by an evaluator of the published semantics."""

from __future__ import annotations

from typing import Any

import pytest

from child_makers import make_wanted
from conch import names
from makers import SHA256, make_model, make_service, stored
from network_policy import Flow, Outside, Pod, allowed, matches

SERVER = Pod("default", names.pod_labels("vision"))
SAME_NAMESPACE = Pod("default", {"app": "shop"})
ELSEWHERE = Pod("shop", {"app": "shop"})
PROMETHEUS = Pod("monitoring", {"app": "prometheus"})
OTHER_SERVICE = Pod("default", names.pod_labels("speech"))
DNS = Pod("kube-system", {"k8s-app": "kube-dns"})
INTERNET = Outside("203.0.113.5")
API_SERVER = Outside("10.96.0.1")

PVC = make_model()
IMAGE = make_model(name="b", source={"uri": "image://registry.example/m:1#/model.onnx"})
HTTPS = make_model(name="c", source={"uri": "https://models.example/m.onnx", "digest": SHA256})
HTTPS_9443 = make_model(name="d", source={"uri": "https://models.example:9443/m.onnx", "digest": SHA256})


def policy_of(*models: dict[str, Any]) -> dict[str, Any]:
    return make_wanted(stored(make_service(models=list(models))))["NetworkPolicy vision-network"]


@pytest.mark.parametrize("port", [8000, 8001])
@pytest.mark.parametrize("client", [SAME_NAMESPACE, ELSEWHERE, PROMETHEUS, OTHER_SERVICE, INTERNET])
def test_clients_of_any_namespace_reach_the_inference_ports(client: Pod | Outside, port: int) -> None:
    assert allowed([policy_of(PVC)], Flow(client, SERVER, port))


def test_only_the_prometheus_namespace_reads_the_metrics() -> None:
    policy = policy_of(PVC)
    assert allowed([policy], Flow(PROMETHEUS, SERVER, 8002))
    for client in (SAME_NAMESPACE, ELSEWHERE, OTHER_SERVICE, INTERNET, API_SERVER):
        assert not allowed([policy], Flow(client, SERVER, 8002)), client


@pytest.mark.parametrize("port", [1, 22, 53, 80, 443, 7999, 8003, 8080, 9090, 10250, 65535])
@pytest.mark.parametrize("client", [SAME_NAMESPACE, ELSEWHERE, PROMETHEUS, INTERNET])
def test_no_other_port_is_open(client: Pod | Outside, port: int) -> None:
    assert not allowed([policy_of(PVC, HTTPS)], Flow(client, SERVER, port))


@pytest.mark.parametrize("port", [8000, 8001, 8002])
def test_inference_ports_take_no_datagrams(port: int) -> None:
    assert not allowed([policy_of(PVC)], Flow(PROMETHEUS, SERVER, port, "UDP"))


@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
@pytest.mark.parametrize("resolver", [DNS, Outside("169.254.20.10")])
def test_names_are_resolved_by_cluster_and_node_resolvers(resolver: Pod | Outside, protocol: str) -> None:
    assert allowed([policy_of(PVC)], Flow(SERVER, resolver, 53, protocol))


@pytest.mark.parametrize(
    ("models", "open_ports"),
    [
        ([PVC], set()),
        ([IMAGE], set()),
        ([PVC, IMAGE], set()),
        ([HTTPS], {443}),
        ([HTTPS_9443], {9443}),
        ([PVC, HTTPS, HTTPS_9443], {443, 9443}),
    ],
)
def test_the_model_stores_port_is_open_only_to_services_that_download(
    models: list[dict[str, Any]], open_ports: set[int]
) -> None:
    policy = policy_of(*models)
    for port in (80, 443, 6443, 8000, 8001, 8002, 9443, 10250):
        assert allowed([policy], Flow(SERVER, INTERNET, port)) is (port in open_ports), port


@pytest.mark.parametrize("port", [443, 6443])
def test_the_api_server_is_out_of_reach_without_a_download(port: int) -> None:
    assert not allowed([policy_of(PVC, IMAGE)], Flow(SERVER, API_SERVER, port))


def test_servers_do_not_call_each_other_or_metadata_services() -> None:
    policy = policy_of(PVC, HTTPS)
    assert not allowed([policy], Flow(SERVER, OTHER_SERVICE, 8000))
    assert not allowed([policy], Flow(SERVER, Outside("169.254.169.254"), 80))


STORE = make_model(name="e", source={"uri": "gs://models/m", "identity": "ServiceAccount"})


@pytest.mark.parametrize("address", ["169.254.169.252", "169.254.169.254", "169.254.170.23"])
@pytest.mark.parametrize("port", [80, 988])
def test_a_source_with_the_clouds_identity_may_ask_the_nodes_metadata_service(address: str, port: int) -> None:
    assert allowed([policy_of(STORE)], Flow(SERVER, Outside(address), port))
    assert not allowed([policy_of(STORE)], Flow(SERVER, INTERNET, port))


@pytest.mark.parametrize(
    ("runtime", "port"),
    [
        ({"responseCache": {"redis": {"host": "redis", "port": 6380}}}, 6380),
        ({"tracing": {"endpoint": "http://otel:4318"}}, 4318),
    ],
)
def test_what_triton_itself_connects_to_is_open_and_only_where_it_is_asked_for(
    runtime: dict[str, Any], port: int
) -> None:
    policy = make_wanted(stored(make_service(runtime=runtime)))["NetworkPolicy vision-network"]
    assert allowed([policy], Flow(SERVER, ELSEWHERE, port))
    assert not allowed([policy], Flow(SERVER, ELSEWHERE, port + 1))
    assert not allowed([policy_of(PVC)], Flow(SERVER, ELSEWHERE, port))


def test_another_services_pods_are_not_touched() -> None:
    assert allowed([policy_of(PVC)], Flow(ELSEWHERE, OTHER_SERVICE, 9999))
    assert allowed([policy_of(PVC)], Flow(ELSEWHERE, Pod("shop", names.pod_labels("vision")), 9999))


def test_a_lost_store_port_closes_again() -> None:
    assert allowed([policy_of(HTTPS)], Flow(SERVER, INTERNET, 443))
    assert not allowed([policy_of(PVC)], Flow(SERVER, INTERNET, 443))


def rule_policy(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "default"}, "spec": {"podSelector": {}, **spec}}


@pytest.mark.parametrize(
    ("policy", "flow", "passes"),
    [
        (rule_policy(), Flow(ELSEWHERE, SAME_NAMESPACE, 1), False),
        (rule_policy(), Flow(SAME_NAMESPACE, ELSEWHERE, 1), True),
        (rule_policy(policyTypes=["Egress"]), Flow(SAME_NAMESPACE, ELSEWHERE, 1), False),
        (rule_policy(policyTypes=["Egress"]), Flow(ELSEWHERE, SAME_NAMESPACE, 1), True),
        (rule_policy(egress=[{}]), Flow(SAME_NAMESPACE, INTERNET, 1), True),
        (rule_policy(ingress=[{}]), Flow(INTERNET, SAME_NAMESPACE, 1, "SCTP"), True),
        (rule_policy(ingress=[{"from": [{"podSelector": {}}]}]), Flow(SAME_NAMESPACE, SERVER, 1), True),
        (rule_policy(ingress=[{"from": [{"podSelector": {}}]}]), Flow(ELSEWHERE, SERVER, 1), False),
        (rule_policy(ingress=[{"from": [{"namespaceSelector": {}}]}]), Flow(ELSEWHERE, SERVER, 1), True),
        (rule_policy(ingress=[{"from": [{"namespaceSelector": {}}]}]), Flow(INTERNET, SERVER, 1), False),
        (
            rule_policy(ingress=[{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "x"}}}]}]),
            Flow(ELSEWHERE, SERVER, 1),
            False,
        ),
        (
            rule_policy(ingress=[{"from": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}]),
            Flow(INTERNET, SERVER, 1),
            True,
        ),
        (
            rule_policy(ingress=[{"from": [{"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.5/32"]}}]}]),
            Flow(INTERNET, SERVER, 1),
            False,
        ),
        (rule_policy(ingress=[{"ports": [{"port": 10, "endPort": 12}]}]), Flow(INTERNET, SERVER, 12), True),
        (rule_policy(ingress=[{"ports": [{"port": 10, "endPort": 12}]}]), Flow(INTERNET, SERVER, 13), False),
        (rule_policy(ingress=[{"ports": [{"protocol": "UDP"}]}]), Flow(INTERNET, SERVER, 13, "UDP"), True),
        (
            rule_policy(ingress=[{"ports": [{"port": "http"}]}]),
            Flow(INTERNET, Pod("default", port_names={"http": ("TCP", 8000)}), 8000),
            True,
        ),
    ],
)
def test_the_evaluator_follows_the_published_semantics(policy: dict[str, Any], flow: Flow, *, passes: bool) -> None:
    assert allowed([policy], flow) is passes


def test_the_evaluator_unites_policies() -> None:
    closed, opened = rule_policy(), rule_policy(ingress=[{"ports": [{"port": 1}]}])
    assert allowed([closed, opened], Flow(INTERNET, SERVER, 1))
    assert not allowed([closed, opened], Flow(INTERNET, SERVER, 2))


@pytest.mark.parametrize(
    ("operator", "values", "holds"),
    [("In", ["a"], True), ("In", ["b"], False), ("NotIn", ["a"], False), ("Exists", None, True),
     ("DoesNotExist", None, False)],
)  # fmt: skip
def test_the_evaluator_knows_every_selector_operator(operator: str, values: list[str] | None, *, holds: bool) -> None:
    selector = {"matchExpressions": [{"key": "k", "operator": operator, "values": values}]}
    assert matches(selector, {"k": "a"}) is holds
