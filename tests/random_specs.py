"""Random InferenceServices for the fuzz tests: most of them nearly right, each with a few fields that may be wrong.

One seed gives one service, so a failure is repeated by its seed. Not hypothesis' own strategies: those take longer than
everything that is tested here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from conch.api.tensor import DataType
from conch.triton.backends import Format

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

TYPES = list(get_args(DataType))
FORMATS = [one for one in get_args(Format) if one != "Ensemble"]
# What no field or few fields take.
WRONG: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 1.5, -0.0, "", "x", "1", "5ms", "1Gi", "a b", "../x", "/etc/passwd",
    "a\nb", "a\x00b", "\x9b", "\u202e", "\ud800", 'a" } backend: "evil', "{{ x }}", "$(reboot)", "x" * 300,
    [], [[]], {}, {"a": {}}, [None], ["x", "x"], [1, 1], {"": ""}, {"name": "x"},
]  # fmt: skip
TEXTS = ["note", "a b", 'a } "b" {{ c }} \\ $(d) é 模型', "", "0", "\u202e"]


class RandomSpec:
    """Draws one service."""

    def __init__(self, random: Random, *, wrong: float = 0.02) -> None:
        self.random, self.wrong = random, wrong

    def service(self) -> dict[str, Any]:
        """A service with one to four models."""
        models = [self.model(f"m{number}") for number in range(self.random.randint(1, 3))]
        if self.chance(0.25):
            models.append(self.ensemble(models))
        spec: dict[str, Any] = {"models": models}
        self.maybe(spec, "accelerator", lambda: {"count": self.random.choice([0, 1, 2, 8])}, 0.5)
        self.maybe(spec, "runtime", self.runtime, 0.7)
        return {"metadata": {"name": "vision"}, "spec": self.spoiled(spec)}

    def chance(self, probability: float) -> bool:
        """Whether something happens."""
        return self.random.random() < probability

    def maybe(self, into: dict[str, Any], key: str, value: Callable[[], Any], probability: float = 0.15) -> None:
        """Set a field now and then."""
        if self.chance(probability):
            into[key] = value()

    def one(self, right: list[Any], wrong: Any) -> Any:
        """One of the right values, and now and then the wrong one."""
        return wrong if self.chance(self.wrong) else self.random.choice(right)

    def spoiled(self, value: Any) -> Any:
        """The value with a few of its parts replaced by something that is probably wrong."""
        if self.chance(self.wrong / 4):
            return self.random.choice(WRONG)
        if isinstance(value, dict):
            result = {key: self.spoiled(part) for key, part in value.items()}
            if result and self.chance(self.wrong / 4):
                result.pop(self.random.choice(list(result)))
            if self.chance(self.wrong / 8):
                result[self.random.choice(["typo", "max_batch_size", "a b", "\x00"])] = self.random.choice(WRONG)
            return result
        if isinstance(value, list):
            return [self.spoiled(part) for part in value]
        return value

    def runtime(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        self.maybe(result, "responseCache", lambda: {"local": {"size": "64Mi"}}, 0.9)
        self.maybe(result, "rateLimiter", lambda: {"resources": [{"name": "lane", "count": 4}]}, 0.3)
        return result

    def model(self, name: str) -> dict[str, Any]:
        """A model of any format but Ensemble, with a few of its features."""
        pick = self.random
        batch = pick.choice([None, 0, 1, 4, 16])
        model: dict[str, Any] = {
            "name": name,
            "format": pick.choice(["ONNX", "Python", *FORMATS]),
            "source": {"uri": f"pvc://models/{name}"},
        }
        if batch is not None:
            model["maxBatchSize"] = batch
        torch = model["format"] == "PyTorch" and not self.chance(self.wrong)
        if torch or self.chance(0.7):
            model["inputs"] = [self.input(f"in{number}") for number in range(pick.randint(1, 3))]
        if torch or self.chance(0.7):
            model["outputs"] = [self.output(f"out{number}") for number in range(pick.randint(1, 3))]
        if batch and self.chance(0.5):
            model["batching"] = self.batching(batch)
            self.maybe(model, "queue", lambda: self.queue(model["batching"].get("priorityLevels", 0)), 0.5)
        elif self.chance(0.3):
            model["sequence"] = self.sequence(batch or 0)
        self.maybe(model, "file", lambda: self.one(["model.onnx", "m.py"], "a/b"))
        if self.chance(0.3):
            model["instances"] = self.instances()
        elif self.chance(0.2):
            model["instanceGroups"] = [
                {"name": f"g{number}", **self.instances()} for number in range(pick.randint(1, 3))
            ]
        self.maybe(model, "decoupled", lambda: True, 0.1)
        self.maybe(model, "responseCache", lambda: True, 0.1)
        self.maybe(model, "acceleratorMemory", lambda: pick.choice(["1Gi", 2**30, "500Mi"]))
        self.maybe(model, "warmup", lambda: [self.warmup(model, f"w{n}") for n in range(pick.randint(1, 2))], 0.2)
        self.maybe(model, "optimization", lambda: self.optimization(model["format"]), 0.2)
        self.maybe(model, "versions", self.versions, 0.2)
        self.maybe(model, "parameters", lambda: {self.one(["a", "A.b"], "EXECUTION_ENV_PATH"): pick.choice(TEXTS)}, 0.3)
        self.maybe(model, "config", lambda: self.config(model), 0.25)
        return model

    def dims(self) -> list[int]:
        return [self.random.choice([-1, 1, 2, 3, 4, 224]) for _ in range(self.random.randint(1, 4))]

    def tensor(self, name: str) -> dict[str, Any]:
        tensor: dict[str, Any] = {"name": name, "dataType": self.random.choice(TYPES), "dims": self.dims()}
        self.maybe(tensor, "reshape", lambda: self.one([[1, *tensor["dims"]]], self.dims()))
        self.maybe(tensor, "shapeTensor", lambda: True, self.wrong / 4)
        return tensor

    def input(self, name: str) -> dict[str, Any]:
        tensor = self.tensor(name)
        self.maybe(tensor, "optional", lambda: True)
        self.maybe(tensor, "raggedBatch", lambda: True, self.wrong / 4)
        if len(tensor["dims"]) == 3 or self.chance(self.wrong):
            self.maybe(tensor, "tensorFormat", lambda: self.random.choice(["None", "NHWC", "NCHW"]), 0.3)
        return tensor

    def output(self, name: str) -> dict[str, Any]:
        tensor = self.tensor(name)
        self.maybe(tensor, "labelFile", lambda: self.one(["labels.txt", "a/b.txt"], "../x"), 0.1)
        return tensor

    def batching(self, batch: int) -> dict[str, Any]:
        pick = self.random
        result: dict[str, Any] = {}
        self.maybe(
            result, "preferredSizes", lambda: [self.one(list(range(1, batch + 1)), batch + 1) for _ in range(2)], 0.4
        )
        self.maybe(result, "maxQueueDelay", lambda: self.one(["0ms", "5ms", "1.5s"], "2m"), 0.4)
        self.maybe(result, "priorityLevels", lambda: pick.randint(1, 4), 0.3)
        if "priorityLevels" in result:
            self.maybe(result, "defaultPriority", lambda: self.one([1], 4), 0.5)
        else:
            self.maybe(result, "preserveOrdering", lambda: True)
        return result

    def limits(self) -> dict[str, Any]:
        pick = self.random
        result: dict[str, Any] = {}
        self.maybe(result, "maxSize", lambda: pick.choice([9, 100, 10**6]), 0.6)
        self.maybe(result, "timeout", lambda: pick.choice(["1ms", "2s", "1h"]), 0.5)
        if "timeout" in result or self.chance(self.wrong):
            self.maybe(result, "timeoutAction", lambda: pick.choice(["Reject", "Delay"]), 0.3)
        self.maybe(result, "allowTimeoutOverride", lambda: True, 0.3)
        return result

    def queue(self, levels: int) -> dict[str, Any]:
        result = self.limits()
        if levels and self.chance(0.7):
            chosen = self.random.sample(range(1, levels + 1), self.random.randint(1, levels))
            result["levels"] = [{"priority": level, **self.limits()} for level in chosen]
        return result

    def instances(self) -> dict[str, Any]:
        pick = self.random
        result: dict[str, Any] = {}
        self.maybe(result, "count", lambda: pick.randint(1, 4), 0.6)
        if self.chance(0.2):
            result["gpus"] = [0]
        else:
            self.maybe(result, "kind", lambda: pick.choice(["GPU", "CPU", "Model"]), 0.2)
        self.maybe(result, "profiles", lambda: ["0"], self.wrong)
        self.maybe(result, "passive", lambda: True, 0.05)
        self.maybe(
            result,
            "rateLimiter",
            lambda: {"priority": 2, "resources": [{"name": self.one(["lane", "Lane"], "door"), "global": True}]},
            0.1,
        )
        return result

    def sequence(self, batch: int) -> dict[str, Any]:
        pick = self.random
        result: dict[str, Any] = {"strategy": pick.choice(["Direct", "Oldest"])}
        self.maybe(result, "idleTimeout", lambda: pick.choice(["1s", "5m"]), 0.3)
        if result["strategy"] == "Direct":
            self.maybe(result, "minimumSlotUtilization", lambda: pick.choice([0, 0.5, 1]), 0.3)
        else:
            self.maybe(result, "maxCandidates", lambda: pick.randint(1, 99), 0.3)
            self.maybe(result, "preferredSizes", lambda: self.one([[max(batch, 1)]], [99]), 0.3 * bool(batch))
        kinds = pick.sample(["Start", "End", "Ready", "CorrelationID"], pick.randint(0, 4))
        result["controls"] = [self.control(kind) for kind in kinds]
        result["states"] = [self.state(f"s{number}") for number in range(pick.randint(0, 2))]
        return result

    def control(self, kind: str) -> dict[str, Any]:
        pick = self.random
        result: dict[str, Any] = {"tensor": f"c{kind}", "kind": kind}
        if kind == "CorrelationID":
            self.maybe(result, "dataType", lambda: self.one(["UINT64", "STRING", "INT32"], "FP32"), 0.5)
        else:
            self.maybe(result, "dataType", lambda: pick.choice(["INT32", "FP32", "BOOL"]), 0.5)
            more = [[-1, 1], [0.5, 1]] if result.get("dataType") == "FP32" else []
            self.maybe(result, "falseTrue", lambda: self.one([[0, 1], [1, 0], *more], [0.5, 7]), 0.4)
        return result

    def state(self, name: str) -> dict[str, Any]:
        result: dict[str, Any] = {
            "inputName": f"{name}in",
            "outputName": f"{name}out",
            "dataType": self.random.choice(TYPES),
            "dims": [2, -1],
        }
        initial = {"name": "first", "dataType": result["dataType"], "dims": [2, 3]}
        self.maybe(result, "initial", lambda: [initial], 0.4)
        self.maybe(result, "initial", lambda: [{**initial, "data": "File", "file": "x.bin"}], 0.2)
        self.maybe(result, "sameBuffer", lambda: True)
        if "sameBuffer" in result or self.chance(self.wrong):
            self.maybe(result, "growableMemory", lambda: True, 0.3)
        return result

    def warmup(self, model: dict[str, Any], name: str) -> dict[str, Any]:
        pick = self.random
        result: dict[str, Any] = {"name": name}
        self.maybe(result, "count", lambda: pick.randint(1, 9), 0.3)
        self.maybe(result, "batchSize", lambda: self.one([max(model.get("maxBatchSize", 0), 1)], 99), 0.3)
        if self.chance(0.5) or not model.get("inputs"):
            inputs = []
            for tensor in model.get("inputs") or [self.input("x")]:
                data = pick.choice(["Zero", "File"] if tensor["dataType"] == "STRING" else ["Zero", "Random", "File"])
                entry = {
                    "name": tensor["name"],
                    "dataType": tensor["dataType"],
                    "dims": [max(size, 1) for size in tensor["dims"]],
                    "data": data,
                }
                inputs.append({**entry, "file": "x.bin"} if data == "File" else entry)
            result["inputs"] = inputs
        return result

    def optimization(self, model_format: str) -> dict[str, Any]:
        pick = self.random
        result: dict[str, Any] = {}
        self.maybe(result, "graphLevel", lambda: pick.choice([-1, 1, 2]), 0.4)
        self.maybe(result, "priority", lambda: pick.choice(["Default", "Max", "Min"]), 0.3)
        self.maybe(result, "pinnedMemory", lambda: {"input": False}, 0.3)
        self.maybe(result, "eagerBatching", lambda: True, 0.3)
        if model_format == "ONNX" or self.chance(self.wrong):
            self.maybe(
                result, "tensorRT", lambda: {"precision": pick.choice(["FP16", "INT8"]), "workspace": "1Gi"}, 0.4
            )
            self.maybe(result, "openVINO", dict, 0.2)
        if model_format == "TensorRT" or self.chance(self.wrong):
            graph = {"batchSize": 2, "inputs": [{"name": "x", "dims": [2]}]}
            self.maybe(result, "cudaGraphs", lambda: {"specs": [graph]}, 0.5)
        return result

    def versions(self) -> dict[str, Any]:
        return self.random.choice(
            [{}, {"policy": "All"}, {"count": 3}, {"policy": "Specific", "numbers": self.one([[1, 7]], [])}]
        )

    def config(self, model: dict[str, Any]) -> dict[str, Any]:
        pick = self.random
        inputs = model.get("inputs") or [{"name": "x"}]
        entry = {
            "kind": self.one(["BATCH_ELEMENT_COUNT", "BATCH_ITEM_SHAPE"], "BATCH"),
            "target_name": ["n"],
            "data_type": self.one(["TYPE_INT32", "TYPE_FP32"], "TYPE_INT64"),
            "source_input": [inputs[0]["name"]],
        }
        parts: list[dict[str, Any]] = [
            {"metric_tags": {"team": pick.choice(TEXTS)}},
            {"batch_input": [entry]},
            {"model_operations": {"op_library_filename": [self.one(["a/b.so"], "../x.so")]}},
            {"cc_model_filenames": {self.one(["8.0"], "x"): self.one(["m.plan"], "../m")}},
            {"runtime": self.one(["libtriton_x.so"], "/x")},
            {"model_repository_agents": {"agents": [{"name": self.one(["checksum"], "evil")}]}},
            {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [{"name": "cuda"}]}}},
            {"model_metrics": {"metric_control": [{"metric_identifier": {"family": "f"},
                                                   "histogram_options": {"buckets": [1, 2.5]}}]}},
        ]  # fmt: skip
        chosen: dict[str, Any] = {}
        if self.chance(self.wrong * 4):
            chosen["dynamic_batching"] = {"preferred_batch_size": [pick.choice([1, "x"])]}
        for part in pick.sample(parts, pick.randint(1, 2)):
            chosen |= part
        return chosen

    def ensemble(self, members: list[dict[str, Any]]) -> dict[str, Any]:
        """A chain over some of the models, its ends like theirs."""
        pick = self.random
        chain = pick.sample(members, 1 if self.chance(0.6) else pick.randint(1, len(members)))
        steps, tensor = [], "start"
        for number, member in enumerate(chain):
            made = f"t{number}"
            inputs = [entry["name"] for entry in member.get("inputs") or [{"name": "x"}]]
            outputs = [entry["name"] for entry in member.get("outputs") or [{"name": "y"}]]
            steps.append(
                {"model": member["name"], "inputs": dict.fromkeys(inputs, tensor), "outputs": {outputs[0]: made}}
            )
            tensor = made
        first = (chain[0].get("inputs") or [self.tensor("x")])[0]
        last = (chain[-1].get("outputs") or [self.tensor("y")])[0]
        pick.shuffle(steps)
        result = {
            "name": "all",
            "format": "Ensemble",
            "inputs": [{"name": "start", "dataType": first["dataType"], "dims": first["dims"]}],
            "outputs": [{"name": tensor, "dataType": last["dataType"], "dims": last["dims"]}],
            "steps": steps,
        }
        self.maybe(result, "maxBatchSize", lambda: 1, 0.5)
        self.maybe(result, "batching", dict, self.wrong)
        return result
