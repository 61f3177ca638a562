"""What a server said when it could not start → which model, why, and what helps. Pure.

The table's messages are those of tritonserver 2.51 (24.10), run with each fault, where no source is named; those of
backends that need an accelerator come from issue threads of triton-inference-server and NVIDIA/TensorRT.
`tests/unit/test_failures.py` holds each message as it was seen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from conch.api.conditions import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_SAID: Final = 300
MAX_TOLD: Final = 3
"""Models that one message tells of."""


@dataclass(frozen=True)
class Failure:
    """One cause; `cause` and `fix` are clauses without a full stop, and stay the same from try to try (R11)."""

    reason: Reason
    model: str | None
    """The model that broke; None: the server as a whole, or nobody says."""
    cause: str
    fix: str
    said: str
    """Triton's own words, on one line."""


@dataclass(frozen=True)
class _Rule:
    """A pattern over the line that decides or, if that says too little, over all that was said.

    `cause` and `fix` may use the pattern's named groups and `{field}`, the model's place in the spec. Without `quotes`
    Triton's words change from try to try and are left out. A `vague` line is explained by an earlier one, if any.
    """

    pattern: re.Pattern[str]
    cause: str
    fix: str
    reason: Reason = Reason.MODEL_LOAD_FAILED
    quotes: bool = True
    vague: bool = False


def _rule(
    pattern: str,
    cause: str,
    fix: str,
    reason: Reason = Reason.MODEL_LOAD_FAILED,
    *,
    quotes: bool = True,
    vague: bool = False,
) -> _Rule:
    return _Rule(re.compile(pattern, re.IGNORECASE), cause, fix, reason, quotes, vague)


_MORE_ACCELERATOR: Final = (
    "use an accelerator with more memory (spec.accelerator.memory or products), fewer instances, or fewer models in "
    "one service"
)
_REBUILD: Final = (
    "build the plan with that TensorRT version on such an accelerator, or choose spec.runtime.image and "
    "spec.accelerator to fit it; with {field}.source.engine Conch checks it before scheduling"
)

# The first that matches decides, so the narrower come first. A model's code writes what it likes and is read again at
# each event of its pod: what repeats in a pattern has a bound or a character that ends it, or minutes go by.
RULES: Final[tuple[_Rule, ...]] = (
    # --- memory
    _rule(
        r"Unable to initialize shared memory key .{0,200}?requested size \((?P<size>\d+) bytes\)"
        r"|run out of shared memory",
        "the pod's shared memory is used up",
        "raise spec.runtime.sharedMemory, of which each instance of a Python model needs 1Mi and its tensors more, or "
        "lower {field}.instances.count",
        Reason.OUT_OF_SHARED_MEMORY,
    ),
    # server#7562 and vllm-project/vllm#2248
    _rule(
        r"No available memory for the cache blocks|Free memory on device .{0,80}? is less than desired",
        "the accelerator has no memory left for the engine's cache",
        "use an accelerator with more memory, raise gpu_memory_utilization in the model's model.json, or lower its "
        "max_model_len",
        Reason.OUT_OF_ACCELERATOR_MEMORY,
        quotes=False,
    ),
    # PyTorch; onnxruntime (server#7019, #5661); TensorRT; tensorrtllm_backend#303; CUDA's own words
    _rule(
        r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUDA failure 2: out of memory|Cuda Error in [^:]{1,80}: 2 \(out "
        r"of memory\)|CUDA runtime error in .{0,200}?: out of memory|cudaMalloc.{0,120}?out of memory"
        r"|Cuda Runtime \(out of memory\)|CNMEM_STATUS_OUT_OF_MEMORY"
        r"|BFCArena::\w+.{0,300}?Failed to allocate memory for requested buffer",
        "the accelerator has too little free memory",
        _MORE_ACCELERATOR,
        Reason.OUT_OF_ACCELERATOR_MEMORY,
        quotes=False,
    ),
    _rule(
        r"Cannot allocate memory|std::bad_alloc|MemoryError",
        "the container has too little memory",
        "raise spec.resources.memory",
        Reason.OUT_OF_MEMORY,
    ),
    _rule(
        r"No space left on device",
        "the pod's disk is full",
        "use nodes with more disk, fewer models in one service, or a pvc:// or image:// source, which isn't copied",
        Reason.DISK_FULL,
    ),
    # --- the accelerator and its driver
    # TensorRT's words: server#317, #2743, #5812
    _rule(
        r"engine plan file is not compatible with this version of TensorRT, expecting library version"
        r" (?P<wanted>[\d.]+) got (?P<got>[\d.]+)",
        "the plan was built with TensorRT {got}, the server has {wanted}",
        _REBUILD,
        Reason.ENGINE_MISMATCH,
    ),
    _rule(
        r"Version tag does not match.{0,40}?Current Version: (?P<wanted>\d+), Serialized Engine Version: (?P<got>\d+)",
        "the plan was built with another TensorRT (serialization {got}) than the server's ({wanted})",
        _REBUILD,
        Reason.ENGINE_MISMATCH,
    ),
    # NVIDIA/TensorRT#2176, #2177, #564
    _rule(
        r"plan file is generated on an incompatible device, expecting compute (?P<wanted>[\d.]+) got compute"
        r" (?P<got>[\d.]+)",
        "the plan was built for compute capability {got}, the pod's accelerator has {wanted}",
        _REBUILD,
        Reason.ENGINE_MISMATCH,
    ),
    _rule(
        r"no kernel image is available for execution on the device",
        "the model or a library holds no code for the accelerator's compute capability",
        "rebuild it for this accelerator, or choose others with spec.accelerator.products or computeCapability",
        Reason.ENGINE_MISMATCH,
    ),
    # server#2584, #8467
    _rule(
        r"specifies invalid or unsupported gpu id (?P<id>\d+)",
        "the pod has no accelerator {id} that Triton can use",
        "correct {field}.instances.gpus, which counts the pod's own from 0, or raise spec.accelerator.count",
    ),
    _rule(
        r"has kind KIND_GPU but no GPUs are available",
        "Triton finds no accelerator in the pod",
        "set spec.accelerator.count, check the node's driver and device plugin, or set {field}.instances.kind to CPU",
        Reason.NO_ACCELERATOR_IN_POD,
    ),
    # nvidia-container-cli refuses to start the container; the kubelet shows its words
    _rule(
        r"unsatisfied condition: (?P<wanted>cuda>=[\d.]+)",
        "the node's driver is too old for the image, which needs {wanted}",
        "update the node's driver, or use an older Triton release in spec.runtime.image",
        Reason.DRIVER_TOO_OLD,
    ),
    _rule(
        r"CUDA driver version is insufficient for CUDA runtime version",
        "the node's driver is too old for the image's CUDA, or isn't there",
        "update the node's driver, or use an older Triton release in spec.runtime.image",
        Reason.DRIVER_TOO_OLD,
    ),
    _rule(
        r"container was built for NVIDIA Driver Release (?P<wanted>[\d.]+) or later",
        "the node's driver is too old for the image, which needs {wanted}",
        "update the node's driver, or use an older Triton release in spec.runtime.image",
        Reason.DRIVER_TOO_OLD,
    ),
    # --- what the image lacks
    _rule(
        r"unable to find backend library for backend '(?P<backend>[^']{1,80})'",
        "the image has no backend {backend}",
        "use an image with it in spec.runtime.image, or another {field}.format",
        Reason.BACKEND_MISSING,
    ),
    _rule(
        r"unable to find 'libtritoncache_(?P<cache>\w+)\.so'",
        "the image has no response cache of kind {cache}",
        "use an image that has it, or spec.runtime.responseCache.local",
        Reason.BACKEND_MISSING,
    ),
    _rule(
        r"No module named '(?P<module>[^']{1,80})'",
        "its Python code needs the module {module}, which the image lacks",
        "use an image with it in spec.runtime.image, or ship an environment with the model: "
        "{field}.parameters.EXECUTION_ENV_PATH",
    ),
    # --- files and versions
    _rule(
        r"ignore version directory '(?P<folder>[^']{1,80})' which fails to convert to integral number",
        "its version folder {folder} is not a number",
        "name the folders of the source 1, 2, and so on",
    ),
    _rule(
        r"version (?P<version>-?\d+) is specified for model '[^']+', but the version directory is not present",
        "the source has no version {version}",
        "correct {field}.versions.numbers, or add the folder {version} to the source",
    ),
    _rule(
        r"at least one version must be available under the version policy",
        "the source has no version folder that {field}.versions would serve",
        "put the model's files into a folder 1 of the source, or correct {field}.versions",
        vague=True,
    ),
    _rule(
        r"Python model file not found in '/(?:[^']*/)?(?P<file>[^'/]+/[^'/]+)'"
        r"|/(?P<onnx>[^ /]+/[^ /]+) is missing; put the ONNX file there",
        "its file {file}{onnx} isn't there",
        "put it into the source, or name the file that is there in {field}.file",
    ),
    _rule(
        r"failed to open text file for read /\S*?/(?P<file>[^/ ]+): No such file"
        r"|Failed to get the canonical path for /\S*?/(?P<path>[^/ ]+)\.$",
        "the file {file}{path}, which the spec names, isn't there",
        "put it beside the model's versions in the source, or correct its name in {field}",
    ),
    _rule(
        r"INVALID_PROTOBUF|Protobuf parsing failed",
        "its file isn't a valid ONNX model",
        "check that {field}.source names an ONNX file, whole and unaltered (set its digest), and that "
        "{field}.format fits",
    ),
    _rule(
        r"unable to load plan file|failed to (?:load|deserialize)[^.]{0,60}engine|unable to create TensorRT engine",
        "its plan can't be read by the server's TensorRT",
        _REBUILD,
        Reason.ENGINE_MISMATCH,
        vague=True,
    ),
    _rule(
        r"PytorchStreamReader failed|is not a (?:TorchScript|TensorFlow) |invalid magic number",
        "its file can't be read by the backend",
        "check that {field}.source names the whole, unaltered file and that {field}.format fits",
    ),
    # --- the spec against the model
    # onnxruntime_backend#165, server#5834, #4194
    _rule(
        r"tensor '(?P<tensor>[^']{1,120})': the model expects \d+ dimensions \(shape (?P<model_shape>\[[-\d, ]*\])\) "
        r"but the model configuration specifies \d+ dimensions \((?:.{0,200}? complete )?shape "
        r"(?P<shape>\[[-\d, ]*\])\)",
        "tensor {tensor} has the shape {model_shape} in the model and {shape} in the spec",
        "correct its dims in {field}.inputs or outputs (without the batch, which maxBatchSize above 0 adds), or leave "
        "it out: Triton completes it",
    ),
    # server#7056, #5013; server#1105; the python backend's own
    _rule(
        r"configuration specified max-batch (?P<asked>\d+) but TensorRT engine only supports max-batch (?P<most>\d+)"
        r"|unexpected configuration maximum batch size (?P<asked2>\d+) for '[^']+', model maximum is (?P<most2>\d+)"
        r"|specified max_batch_size (?P<asked3>\d+), but in auto-complete-config function for model '[^']+' specified "
        r"max_batch_size (?P<most3>\d+)",
        "the model takes batches of at most {most}{most2}{most3}, not {asked}{asked2}{asked3}",
        "set {field}.maxBatchSize to {most}{most2}{most3}, or build the model for larger batches",
    ),
    # server#7462
    _rule(
        r"model to support batching the shape should have at least 1 dimension and the first dimension must be -1",
        "the model has no batch dimension that varies",
        "set {field}.maxBatchSize to 0 and give dims with all dimensions, or export the model with a dynamic batch",
    ),
    _rule(
        r"unexpected inference (?P<kind>input|output) '(?P<tensor>[^']{1,120})', allowed \w+ are: "
        r"(?P<allowed>[^\"\\]{1,160})",
        "the model has no {kind} {tensor}",
        "use its own names in {field}.{kind}s: {allowed}",
    ),
    _rule(
        r"unexpected datatype (?P<got>TYPE_\w+) for inference (?P<kind>input|output) '(?P<tensor>[^']{1,120})', "
        r"expecting (?P<wanted>TYPE_\w+)",
        "{kind} {tensor} is {wanted} in one and {got} in the other of model and spec",
        "correct its dataType in {field}.{kind}s, or leave it out: Triton completes it",
    ),
    _rule(
        r"ensemble \S+ contains models that are not available or ambiguous: (?P<members>[^\"\\]{1,160})",
        "its steps use models that aren't loaded: {members}",
        "see what those models say, or correct {field}.steps",
    ),
    _rule(
        r"ensemble tensor (?P<tensor>[^: ]{1,120}): inconsistent (?P<what>shape|data type): (?P<one>\S+) is inferred "
        r"from model (?P<from>\S+) while (?P<other>\S+) is inferred from model (?P<to>[^\s\"]+)",
        "tensor {tensor} is {one} in {from} and {other} in {to}",
        "make the {what} of inputs and outputs agree along {field}.steps",
    ),
    _rule(
        r"allows maximum batch size (?P<asked>\d+), but it contains model (?P<member>\S+) which only allows maximum "
        r"batch size to be (?P<most>\d+)",
        "it takes batches of {asked}, its member {member} of at most {most}",
        "set {field}.maxBatchSize to at most {most}, or raise that of {member}",
    ),
    _rule(
        r"Resource count for \"?(?P<resource>[^\" ]{1,80})\"? is limited to (?P<limit>\d+) .{0,120}?minimum required "
        r"count is (?P<wanted>\d+)",
        "it asks for {wanted} of the rate limiter's resource {resource}, of which there are {limit}",
        "raise it in spec.runtime.rateLimiter.resources, or lower it in {field}.instances.rateLimiter",
    ),
    _rule(
        r"Error parsing text-format inference\.ModelConfig: \S+ (?P<what>[^\n\"]{1,120}\"?[^\n]{0,80})",
        "this Triton release doesn't know a part of its configuration ({what})",
        "use a newer release in spec.runtime.image, or remove that field",
    ),
    _rule(
        r"unexpected directory name '[^']+' for model '(?P<other>[^']+)', directory name must equal model name",
        "its configuration names another model, {other}",
        "give the two models names of their own",
    ),
    # --- Python's own
    _rule(
        r"has no attribute 'TritonPythonModel'",
        "its Python file has no class TritonPythonModel",
        "add the class, with an execute method, to the file that {field}.source names",
    ),
    _rule(
        r"SyntaxError: (?P<what>[^\n\"\\]{1,160})",
        "its Python file can't be parsed: {what}",
        "correct the file; the image's Python may be older than the one it was written for",
    ),
    _rule(
        r"Stub process '[^']+' is not healthy|stub process exited unexpectedly",
        "the process of its Python code died without a word, as one does that is killed for want of memory",
        "raise spec.resources.memory, and look for a crash in the pod's log",
    ),
    _rule(
        r"(?P<what>\b(?:TritonModelException|[A-Z]\w*(?:Error|Exception|Exit)): [^\n\"\\]{1,200})",
        "its code failed: {what}",
        "correct the model's code or files; the pod's log has the whole trace",
    ),
    # --- the server itself
    _rule(
        r"failed to start (?P<service>\w+) service: .{0,80}?Socket '[^']*?:(?P<port>\d+)' already in use",
        "port {port} is taken by another process of the pod",
        "remove what listens there from the image of spec.runtime.image",
        Reason.SERVER_FAILED,
    ),
    _rule(
        r"Failed to initialize LocalCache",
        "the local response cache can't be made",
        "raise spec.runtime.responseCache.local.size, and spec.resources.memory with it",
        Reason.SERVER_FAILED,
    ),
    # What is left of the help that Triton prints for an option that it doesn't know
    _rule(
        r"unrecognized option|DEPRECATED: Please use --trace-config",
        "this Triton release doesn't know an option that Conch sets",
        "use a newer release in spec.runtime.image",
        Reason.SERVER_FAILED,
        quotes=False,
    ),
)

_PREFIX: Final = re.compile(
    r"^(?:[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ |\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S* [IWEF] \d+ )[\w./-]+:\d+\] *"
)
# Each start on a machine without an accelerator says these, and they cost it nothing.
_ALWAYS_THERE: Final = re.compile(
    r"Unable to allocate pinned system memory|CudaDriverHelper has not been initialized|no pinned memory pool"
    r"|unable to create stream for|NVIDIA Driver was not detected"
)
_DECIDES: Final = (
    re.compile(r"failed to load '(?P<model>[^']{1,253})' version -?\d+: (?P<why>.+)", re.DOTALL),
    re.compile(r"failed to load model '(?P<model>[^']{1,253})': (?P<why>.+)", re.DOTALL),
    re.compile(r"Poll failed for model directory '(?P<model>[^']{1,253})': (?P<why>.+)", re.DOTALL),
    re.compile(r"(?P<why>in ensemble (?P<model>[^ ,]{1,253}), .+)", re.DOTALL),
    re.compile(r"(?P<why>ensemble (?P<model>[^ ,]{1,253}) (?:contains|allows) .+)", re.DOTALL),
    # A stub that never answers leaves no line but its own: server#4331.
    re.compile(r"(?P<why>Failed to preinitialize Python stub: .+/(?P<model>[^/']{1,253})/\d+/[^/']+'.*)", re.DOTALL),
)
# They name no model though they speak of one.
_OF_SOME_MODEL: Final = re.compile(r"^Failed to initialize Python stub|^ERROR: Failed to create instance")
_CHANGES: Final = re.compile(
    r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b0x[0-9a-fA-F]+\b"
    # Folders that Triton and Python's tempfile make anew for each process.
    r"|(?<=/tmp/)(?:python_env_\w{6}|folder\w{6}|tmp\w{8})\b"
)


def explain(said: str, models: Sequence[str], *, accelerator: bool = True) -> tuple[Failure, ...]:
    """Every model that `said` names as broken, with its cause, in the order of the spec; one without a model at most.

    Args:
        said: the end of a server's log, or what the kubelet says of its container.
        models: the names of the spec's models, in its order; they become `spec.models[INDEX]` in the fixes.
        accelerator: whether the pod has one; without, the lines that each start without one says are no cause.

    Returns:
        Nothing when no rule fits and no model is named: then quote the words as they are.
    """
    lines = [_plain(line) for line in said.splitlines()]
    lines = [line for line in lines if line and not _ALWAYS_THERE.search(line)]
    broken: dict[str, str] = {}
    for line in lines:
        for pattern in _DECIDES:
            match = pattern.search(line)
            if match is not None:
                broken.setdefault(match["model"], match["why"])
                break
    order = {name: index for index, name in enumerate(models)}
    found = [
        _explained(why, _context(model, lines), model, order, alone=len(broken) == 1)
        for model, why in sorted(broken.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
    ]
    if found:
        return tuple(found)
    # Without a model that broke, it is the server; with an accelerator, what it says of the driver counts again.
    rule, match = _match(said if accelerator else "\n".join(lines), RULES)
    if rule is None or match is None:
        return ()
    decisive = next((line for line in [*lines, *said.splitlines()] if rule.pattern.search(line)), match[0])
    return (_failure(rule, match, _plain(decisive), None, "spec.models[]"),)


def sentence(failures: Iterable[Failure]) -> str:
    """What a condition says of them: `Model "m" can't be loaded: CAUSE; FIX. Triton: QUOTE`."""
    failures = list(failures)
    told = failures[:MAX_TOLD]
    each = [f"{_subject(failure)}: {failure.cause}; {failure.fix}.{_quoted(failure, len(told))}" for failure in told]
    return " ".join([*each, "More models are broken."] if len(failures) > MAX_TOLD else each)


def _quoted(failure: Failure, of: int) -> str:
    # A condition's message ends at 1024 characters: with several models each gets less for its words.
    return f" Triton: {_shortened(failure.said, MAX_SAID // of)}" if failure.said else ""


def _subject(failure: Failure) -> str:
    return "Triton can't start" if failure.model is None else f'Model "{failure.model}" can\'t be loaded'


def _context(model: str, lines: Sequence[str]) -> str:
    """What may explain a model that broke: what was said of no other one, such as the words of TensorRT's logger."""
    about_others = []
    for line in lines:
        match = next((found for pattern in _DECIDES if (found := pattern.search(line)) is not None), None)
        if (match is not None and match["model"] != model) or _OF_SOME_MODEL.search(line):
            about_others.append(line)
    return "\n".join(line for line in lines if line not in about_others)


def _explained(why: str, context: str, model: str, order: Mapping[str, int], *, alone: bool) -> Failure:
    field = _field(model, order)
    rule, match = _match(why, RULES)
    # Where several broke, a line that names none may well be another's.
    if alone if rule is None else rule.vague:
        earlier, earlier_match = _match(context, [one for one in RULES if not one.vague])
        rule, match = (earlier, earlier_match) if earlier is not None else (rule, match)
    if rule is None or match is None:
        return Failure(Reason.MODEL_LOAD_FAILED, model, "Triton refuses it", f"check {field}", _said(why))
    return _failure(rule, match, why, model, field)


def _failure(rule: _Rule, match: re.Match[str], said: str, model: str | None, field: str) -> Failure:
    words = {key: _clean(_untraced(value or "")) for key, value in match.groupdict().items()}
    words["field"] = field
    return Failure(
        rule.reason,
        model,
        rule.cause.format_map(words),
        rule.fix.format_map(words),
        _said(said) if rule.quotes else "",
    )


def _match(text: str, rules: Sequence[_Rule]) -> tuple[_Rule, re.Match[str]] | tuple[None, None]:
    for rule in rules:
        match = rule.pattern.search(text)
        if match is not None:
            return rule, match
    return None, None


def _field(model: str | None, order: Mapping[str, int]) -> str:
    return f"spec.models[{order[model]}]" if model is not None and model in order else "spec.models[]"


def _plain(line: str) -> str:
    text = _PREFIX.sub("", line.strip())
    if len(text) > 1 and text[0] == text[-1] == '"':
        # Triton writes a message as a JSON string since 2.48.
        text = text[1:-1].replace('\\"', '"').replace("\\n", "\n").replace("\\t", " ")
    return text


def _said(text: str) -> str:
    return _shortened(_clean(_untraced(text)), MAX_SAID)


def _untraced(text: str) -> str:
    """The first part, where the cause stands: Python's trace follows it."""
    return text.partition("\n\nAt:")[0]


def _shortened(line: str, most: int) -> str:
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _clean(text: str) -> str:
    shown = "".join(character if character.isprintable() else " " for character in _CHANGES.sub("…", text))
    return " ".join(shown.split()).strip(" .")
