"""However a run of the sandbox ends, it leaves no process, mount, namespace, control group or interface."""

import os
import signal
import subprocess
import sys

import pytest

from clusters import Clusters
from sandbox import Sandbox, leftovers
from sandbox.cluster_run import run_key
from sandbox.namespaces import wait_for
from sandbox.progress import quiet

pytestmark = [pytest.mark.sandbox, pytest.mark.own_cluster]


@pytest.fixture(autouse=True)
def alone(clusters: Clusters) -> None:
    """Two cores hold one cluster: the run's own ends before these start theirs."""
    if clusters.on_kind:
        pytest.skip("is about the sandbox's namespaces of this machine, which kind's cluster isn't made of")
    clusters.down()


def test_down_leaves_nothing_with_two_regions() -> None:
    run = run_key("two")
    made = Sandbox.up(run, ["eu", "us"], nodes=False, owner=os.getpid(), tell=quiet)
    try:
        names = {region.name: region.get("namespaces")["items"][0]["metadata"]["name"] for region in made.regions}
        assert set(names) == {"eu", "us"}
        assert leftovers(run)
    finally:
        made.down(keep_logs=False)
    assert leftovers(run) == []


OWNER = """
import os, signal, sys, time
from sandbox import Sandbox
# A shell that starts a test run in the background has it ignore SIGINT, and every child inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
made = Sandbox.up(sys.argv[1], nodes=sys.argv[2] == "nodes", operator_image=False, owner=os.getpid())
if sys.argv[2] == "nodes":
    made.region().apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "sandbox.local/triton:1", "command": ["sleep", "600"]}]}})
    made.region().wait_pod_ready("p")
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_owner_leaves_nothing(number: signal.Signals) -> None:
    run = run_key("owner")
    with subprocess.Popen([sys.executable, "-c", OWNER, run, "nodes"], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline().strip() == "up"
            assert any("process" in line for line in leftovers(run))
        finally:
            owner.send_signal(number)
            try:
                owner.wait(20)
            finally:
                owner.kill()
    wait_for(lambda: leftovers(run) == [], 30, f"left over: {leftovers(run)}")


def test_a_killed_guard_ends_the_run_and_the_next_call_cleans_up() -> None:
    run = run_key("guard")
    made = Sandbox.up(run, nodes=False, owner=os.getpid(), tell=quiet)
    os.kill(int((made.folder / "guard.pid").read_text()), signal.SIGKILL)
    wait_for(lambda: not any("process" in line for line in leftovers(run)), 30, "processes outlive the guard")
    made.down(keep_logs=False)
    assert leftovers(run) == []
