"""The graph of an ensemble: every mistake is named with its step and tensor, every right graph is accepted."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.api.inferenceservice import InvalidSpec, parse_service
from makers import make_model, make_service, make_spec, set_field


def tensor(name: str, *dims: int, kind: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "dataType": kind, "dims": list(dims), **more}


def step(model: str, inputs: dict[str, str], outputs: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"model": model, "inputs": inputs, "outputs": outputs, **more}


DECODE = make_model(
    name="decode",
    format="Python",
    maxBatchSize=8,
    inputs=[tensor("raw", -1, kind="UINT8"), tensor("quality", 1, kind="INT32", optional=True)],
    outputs=[tensor("image", 3, 224, 224), tensor("size", 2, kind="INT32")],
)
NET = make_model(name="net", maxBatchSize=16, inputs=[tensor("x", 3, 224, -1)], outputs=[tensor("y", 10)])
# What Triton completes is unknown here.
BARE = make_model(name="bare")
ENSEMBLE: dict[str, Any] = {
    "name": "all",
    "format": "Ensemble",
    "maxBatchSize": 8,
    "inputs": [tensor("bytes", -1, kind="UINT8")],
    "outputs": [tensor("scores", 10)],
    "steps": [
        step("decode", {"raw": "bytes"}, {"image": "decoded"}),
        step("net", {"x": "decoded"}, {"y": "scores"}),
    ],
}
HERE = "spec.models[3]"
MODELS = [DECODE, NET, BARE, ENSEMBLE]


def service(patch: dict[str, Any]) -> dict[str, Any]:
    made = make_service(models=copy.deepcopy(MODELS))
    for path, value in patch.items():
        set_field(made, path if path.startswith("spec.") else f"{HERE}.{path}", value)
    return made


def problems(patch: dict[str, Any]) -> list[str]:
    try:
        parse_service(service(patch))
    except InvalidSpec as error:
        return error.problems
    return []


THIRD = "steps[2]"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor that nobody makes": (
        {"steps[1].inputs": {"x": "raw_image"}},
        (
            f'{HERE}.steps[1].inputs.x: tensor "raw_image" is produced by no step and is no input of the ensemble; '
            "correct the name, or add an output that makes it"
        ),
    ),
    "a misspelled tensor": (
        {"steps[1].inputs": {"x": "decodet"}},
        (
            f'{HERE}.steps[1].inputs.x: tensor "decodet" is produced by no step and is no input of the ensemble; '
            "did you mean decoded?"
        ),
    ),
    "a tensor made twice": (
        {THIRD: step("bare", {"a": "bytes"}, {"b": "scores"})},
        f'{HERE}.steps[2].outputs.b: tensor "scores" is made by steps[1] (net) too; give each its own name',
    ),
    "an input of the ensemble that a step makes": (
        {"steps[0].outputs.size": "bytes"},
        f'{HERE}.steps[0].outputs.size: tensor "bytes" is made by the ensemble\'s inputs too',
    ),
    "an output that nobody reads": (
        {"steps[0].outputs.size": "size"},
        (
            f'{HERE}.steps[0].outputs.size: tensor "size" is read by no step and is no output of the ensemble, '
            "which Triton "
            "refuses; remove the line"
        ),
    ),
    "an input of the ensemble that nobody reads": (
        {"inputs[1]": tensor("more", 1)},
        f'{HERE}.inputs[1].name: is read by no step; read it, or remove it (got "more")',
    ),
    "an output of the ensemble that nobody makes": (
        {"outputs[1]": tensor("score", 1)},
        f'{HERE}.outputs[1].name: is produced by no step; did you mean scores? (got "score")',
    ),
    "an output of the ensemble that is its input": (
        {"outputs[1]": tensor("bytes", -1, kind="UINT8")},
        f'{HERE}.outputs[1].name: is produced by no step; add it to a step\'s outputs, or remove it (got "bytes")',
    ),
    "an input that the member hasn't": (
        {"steps[1].inputs.z": "decoded"},
        f"{HERE}.steps[1].inputs.z: is no input of net, which has x; correct the name",
    ),
    "an output that the member hasn't": (
        {"steps[1].outputs": {"z": "scores"}},
        f"{HERE}.steps[1].outputs.z: is no output of net, which has y; correct the name",
    ),
    "an input of the member that no tensor feeds": (
        {"steps[0].inputs": {"quality": "bytes"}, "spec.models[0].inputs[1].dataType": "UINT8"},
        f"{HERE}.steps[0].inputs: lack raw, an input of decode that isn't optional; add raw: TENSOR",
    ),
    "a label file": (
        {"outputs[0].labelFile": "labels.txt"},
        (
            f"{HERE}.outputs[0].labelFile: is not for an Ensemble, which has no folder; set it at the model that makes "
            'the tensor (got "labels.txt")'
        ),
    ),
    "two types of one tensor": (
        {"spec.models[1].inputs": [tensor("x", 3, 224, 224, kind="FP16")]},
        (
            f'{HERE}.steps[1].inputs.x: tensor "decoded" is FP32 in steps[0] (decode) and FP16 in steps[1] '
            "(net); make them "
            "the same"
        ),
    ),
    "two types of one tensor, at steps that have names": (
        {
            "spec.models[1].inputs": [tensor("x", 3, 224, 224, kind="FP16")],
            "steps[0].name": "unpack",
            "steps[1].name": "score",
        },
        (
            f'{HERE}.steps[1].inputs.x: tensor "decoded" is FP32 in steps[0] (unpack) and FP16 in steps[1] (score); '
            "make them the same"
        ),
    ),
    "two shapes of one tensor": (
        {"spec.models[1].inputs": [tensor("x", 3, 256, -1)]},
        (
            f'{HERE}.steps[1].inputs.x: tensor "decoded" has dims [3, 224, 224] after the batch in steps[0] '
            "(decode) and "
            "[3, 256, -1] after the batch in steps[1] (net); make them the same"
        ),
    ),
    "another number of sizes": (
        {"spec.models[1].inputs": [tensor("x", 3, 224)]},
        f'{HERE}.steps[1].inputs.x: tensor "decoded" has dims [3, 224, 224] after the batch',
    ),
    "a type at the ensemble's input": (
        {"inputs[0].dataType": "INT8"},
        f'{HERE}.steps[0].inputs.raw: tensor "bytes" is INT8 in the ensemble\'s inputs and UINT8 in steps[0] (decode)',
    ),
    "a shape at the ensemble's output": (
        {"outputs[0].dims": [11]},
        (
            f'{HERE}.outputs[0]: tensor "scores" has dims [10] after the batch in steps[1] (net) and [11] after '
            "the batch "
            "in the ensemble's outputs"
        ),
    ),
    "a member that isn't there": (
        {"steps[1].model": "nett"},
        (
            f"{HERE}.steps[1].model: is no model of this service, which has bare, decode, net; add the model or "
            "correct the "
            'name (got "nett")'
        ),
    ),
    "the ensemble as its own member": (
        {"steps[1].model": "all"},
        f"{HERE}.steps[1].model: is the ensemble itself; name the model that the step runs",
    ),
    "a version that isn't served": (
        {"steps[1].version": 4, "spec.models[1].versions": {"policy": "Specific", "numbers": [1, 3]}},
        f"{HERE}.steps[1].version: is none of the versions of net, [1, 3]; add it there, or correct it (got 4)",
    ),
    "a batch that a member doesn't take": (
        {"maxBatchSize": 9},
        (
            f"{HERE}.maxBatchSize: must be at most 8, the maxBatchSize of decode (steps[0]); lower it, or raise "
            "that model's "
            "(got 9)"
        ),
    ),
    "a circle": (
        {
            "steps": [
                step("bare", {"a": "bytes", "b": "two"}, {"c": "one"}),
                step("bare", {"a": "one"}, {"c": "two", "d": "scores"}),
            ]
        },
        (
            f"{HERE}.steps[0]: waits for its own output: steps[0] (bare) <- steps[1] (bare) <- steps[0] (bare); "
            "break the "
            "circle"
        ),
    ),
    "a step that feeds itself": (
        {"steps": [step("bare", {"a": "bytes", "b": "own"}, {"c": "own", "d": "scores"})]},
        f"{HERE}.steps[0]: waits for its own output: steps[0] (bare) <- steps[0] (bare); break the circle",
    ),
    "no inputs": ({"inputs": []}, f"{HERE}.inputs: are required for an Ensemble, whose tensors Triton can't find out"),
    "no outputs": ({"outputs": []}, f"{HERE}.outputs: are required for an Ensemble"),
    "a cache over a decoupled member": (
        {
            "responseCache": True,
            "spec.runtime.responseCache": {"local": {"size": "1Mi"}},
            "spec.models[0].decoupled": True,
        },
        f"{HERE}.responseCache: doesn't work with decode (steps[0]), which is decoupled; remove it",
    ),
    "a cache over sequences": (
        {
            "responseCache": True,
            "spec.runtime.responseCache": {"local": {"size": "1Mi"}},
            "spec.models[0].sequence": {},
        },
        f"{HERE}.responseCache: doesn't work with decode (steps[0]), which has sequence; remove it",
    ),
    "tensors of different numbers of answers": (
        {
            "spec.models[0].decoupled": True,
            THIRD: step("bare", {"a": "decoded", "b": "bytes"}, {"c": "extra"}),
            "outputs[1]": tensor("extra", 1),
        },
        (
            f"{HERE}.steps[2].inputs: reads tensors of different numbers of answers, because the decoupled "
            "steps[0] (decode) "
            "and the request differ; let it read from one of them only"
        ),
    ),
    "outputs of different numbers of answers": (
        {
            "spec.models[0].decoupled": True,
            THIRD: step("bare", {"a": "bytes"}, {"c": "extra"}),
            "outputs[1]": tensor("extra", 1),
        },
        (
            f"{HERE}.outputs: come from different numbers of answers: the decoupled steps[0] (decode) and the request "
            "differ; let one of them make all"
        ),
    ),
    "ensembles inside each other": (
        {
            "steps[1]": step("other", {"i": "decoded"}, {"o": "scores"}),
            "spec.models[4]": {
                "name": "other",
                "format": "Ensemble",
                "inputs": [tensor("i", 3, 224, 224)],
                "outputs": [tensor("o", 10)],
                "steps": [step("all", {"bytes": "i"}, {"scores": "o"})],
            },
        },
        f"{HERE}.steps: contain each other: all <- other <- all; break the circle",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_graph_is_named_with_step_and_tensor(name: str) -> None:
    patch, words = CASES[name]
    lines = problems(patch)
    assert any(line.startswith(words) for line in lines), lines
    assert all(line.isprintable() and len(line) < 400 for line in lines)


ACCEPTED: dict[str, dict[str, Any]] = {
    "the plain chain": {},
    "steps in another order": {"steps": ENSEMBLE["steps"][::-1]},
    "an optional input that is fed": {
        "inputs[1]": tensor("q", 1, kind="INT32"),
        "steps[0].inputs.quality": "q",
    },
    "a tensor with two readers": {
        THIRD: step("bare", {"a": "decoded"}, {"b": "other"}),
        "outputs[1]": tensor("other", 1),
    },
    "a tensor that is read and is an output": {"outputs[1]": tensor("decoded", 3, 224, 224)},
    "one model in two steps": {
        THIRD: step("net", {"x": "decoded"}, {"y": "again"}),
        "outputs[1]": tensor("again", 10),
    },
    "a size that varies at one end": {"outputs[0].dims": [-1]},
    "a reshape at the ensemble's end": {"outputs": [tensor("scores", 5, 2, reshape=[10])]},
    "a member without batches behind one with them": {
        # Its whole shape has the batch as a first size that varies.
        "spec.models[1].maxBatchSize": 0,
        "spec.models[1].inputs": [tensor("x", -1, 3, 224, 224)],
        "spec.models[1].outputs": [tensor("y", -1, 10)],
    },
    "a member whose batch Triton finds out": {"spec.models[1].maxBatchSize": None},
    "a member that says nothing": {
        "steps[1]": step("bare", {"anything": "decoded"}, {"else": "scores"}),
    },
    "a version that is served": {"steps[1].version": 4},
    "a decoupled member whose answers go on alone": {"spec.models[0].decoupled": True},
    "an ensemble in an ensemble": {
        "spec.models[4]": {
            "name": "outer",
            "format": "Ensemble",
            "maxBatchSize": 4,
            "inputs": [tensor("i", -1, kind="UINT8")],
            "outputs": [tensor("o", 10)],
            "steps": [step("all", {"bytes": "i"}, {"scores": "o"})],
        }
    },
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_right_graph_is_accepted(name: str) -> None:
    assert problems(ACCEPTED[name]) == []


def test_an_ensemble_in_an_ensemble_has_its_own_batch() -> None:
    outer = copy.deepcopy(ACCEPTED["an ensemble in an ensemble"])
    outer["spec.models[4]"]["maxBatchSize"] = 9
    assert problems(outer) == [
        (
            "spec.models[4].maxBatchSize: must be at most 8, the maxBatchSize of all (steps[0]); lower it, or "
            "raise that "
            "model's (got 9)"
        )
    ]


def test_one_mistake_is_one_line() -> None:
    assert len(problems({"steps[1].outputs": {"y": "score"}})) == 2  # made and not read, wanted and not made
    assert len(problems({"steps[1].inputs": {"x": "decodet"}})) == 2
    assert len(problems({"maxBatchSize": 9})) == 1


def graph(random: Random, steps: int) -> dict[str, Any]:
    """A random ensemble without a circle: each step reads tensors that earlier ones make, in shuffled order."""
    made = ["start"]
    chain = []
    for number in range(steps):
        inputs = {f"i{n}": random.choice(made) for n in range(random.randint(1, 3))}
        outputs = {f"o{n}": f"t{number}x{n}" for n in range(random.randint(1, 2))}
        chain.append(step("bare", inputs, outputs))
        made += outputs.values()
    read = {name for one in chain for name in one["inputs"].values()}
    if "start" not in read:
        chain[0]["inputs"]["i0"] = "start"
        read.add("start")
    ends = [name for name in made if name not in {name for one in chain for name in one["inputs"].values()}]
    random.shuffle(chain)
    return {
        "name": "all",
        "format": "Ensemble",
        "inputs": [tensor("start", 1)],
        "outputs": [tensor(name, 1) for name in ends],
        "steps": chain,
    }


@given(st.integers(0, 2**32), st.integers(1, 31))
def test_any_graph_without_a_circle_is_accepted_and_with_one_refused(seed: int, steps: int) -> None:
    random = Random(seed)
    ensemble = graph(random, steps)
    make_spec(models=[BARE, ensemble])
    # The first tensor's maker now also reads the last end.
    makers = {name: one for one in ensemble["steps"] for name in one["outputs"].values()}
    chain = [random.choice(sorted(makers))]
    while True:
        readers = [one for one in ensemble["steps"] if chain[-1] in one["inputs"].values()]
        if not readers:
            break
        chain.append(min(readers[0]["outputs"].values()))
    makers[chain[0]]["inputs"]["back"] = chain[-1]
    ensemble["outputs"] = [one for one in ensemble["outputs"] if one["name"] != chain[-1]] or ensemble["outputs"]
    with pytest.raises(InvalidSpec, match="waits for its own output"):
        make_spec(models=[BARE, ensemble])


def test_sixteen_of_the_largest_ensembles_are_checked_at_once() -> None:
    """Linear: a thousand tensors take milliseconds, and quadratic work would end in the time limit of the test."""
    wide = [
        step("bare", {f"i{n}": f"t{number}x{n}" if number else "start" for n in range(64)},
             {f"o{n}": f"t{number + 1}x{n}" for n in range(64)})
        for number in range(32)
    ]  # fmt: skip
    ensembles = [
        {
            "name": f"e{number}",
            "format": "Ensemble",
            "inputs": [tensor("start", 1)],
            "outputs": [tensor(f"t32x{n}", 1) for n in range(64)],
            "steps": wide,
        }
        for number in range(15)
    ]
    assert len(make_spec(models=[BARE, *ensembles]).models[15].steps) == 32
