"""YAML files as a user keeps them → their documents as plain data, with the line of every field. Reads files.

Values are read as kubectl and the API server read them, which differs from PyYAML's defaults in some scalars (no
dates, no numbers of base 60, `1e3` is a number) and in keys, which are always text.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from conch.api.shown import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from conch.api.places import Step

STDIN: Final = Path("-")
SUFFIXES: Final = (".yaml", ".yml", ".json")
MAX_FILE_BYTES: Final = 16 * 2**20
MAX_NODES: Final = 1_000_000
"""Of one file with its aliases written out; a few lines of aliases of aliases can stand for billions."""
MAX_FILES: Final = 10_000


class UnreadableError(Exception):
    """A file can't be read; the message names it, the reason and the fix."""


@dataclass(frozen=True)
class Place:
    """Where something stands in a file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        """As compilers write it, so that editors and CI systems find it."""
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file before any resource is looked at."""

    place: Place
    message: str


@dataclass(frozen=True)
class Document:
    """One document of a file, or one item of a List in it."""

    file: str
    data: Any
    node: yaml.Node

    def place(self, field: Sequence[Step] = (), *, key: bool = False) -> Place:
        """Where a field stands; of a field that isn't there, its nearest parent.

        Args:
            field: the way to the field, such as ("spec", "models", 0, "name").
            key: the field's key is at fault, not its value.
        """
        here, mark = self.node, self.node.start_mark
        for index, step in enumerate(field):
            found = _child(here, step)
            if found is None:
                break
            name, here = found
            last = index == len(field) - 1
            # A block that begins on the next line is found by its key; a value of its own stands where it stands.
            inline = isinstance(here, yaml.ScalarNode) or bool(getattr(here, "flow_style", False))
            mark = here.start_mark if name is None or (inline and not (key and last)) else name.start_mark
            if name is not None and not last and _child(here, field[index + 1]) is None:
                mark = name.start_mark
        return Place(self.file, mark.line + 1, mark.column + 1)


def files_of(paths: Sequence[Path]) -> Iterator[Path]:
    """The files that were named, and of folders every YAML and JSON file below them, in a stable order.

    Raises UnreadableError for what isn't there.
    """
    count = 0
    for path in paths:
        if path == STDIN or not path.is_dir():
            yield path
            continue
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.suffix in SUFFIXES and file.is_file() and not hidden:
                count += 1
                if count > MAX_FILES:
                    raise UnreadableError(f"{path}: holds more than {MAX_FILES} YAML files; name a smaller folder")
                yield file


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for `-`. Raises UnreadableError."""
    try:
        if path == STDIN:
            content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        fix = "name a file, a folder, or - for standard input"
        raise UnreadableError(f"{path}: can't be read ({error.strerror}); {fix}") from None
    if len(content) > MAX_FILE_BYTES:
        raise UnreadableError(f"{path}: is larger than {MAX_FILE_BYTES // 2**20} MiB; it can't be a manifest")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UnreadableError(f"{path}:{line}: is not UTF-8 text; save it as UTF-8") from None


def read_documents(text: str, file: str) -> tuple[list[Document], list[Fault]]:
    """Every document of a text, empty ones left out, and what is wrong with the text itself.

    A document with a duplicate key, a cycle or a tag of its own is left out and told; after a syntax error no more
    documents are read, since nothing tells where the next one begins.
    """
    documents: list[Document] = []
    faults: list[Fault] = []
    loader: _Loader | None = None
    try:
        loader = _Loader(_json_indent(text))
        while loader.check_node():
            node = loader.get_node()
            if node is None:
                break
            found = list(_node_faults(node, file))
            faults += found
            if found:
                continue
            try:
                documents += _split(Document(file, loader.construct_document(node), node))
            except (ValueError, KeyError, TypeError) as error:
                # PyYAML's own converters, of `!!int x` and the like.
                faults.append(_fault(node, file, f"holds a value that its tag doesn't fit ({error}); remove the tag"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        words = " ".join(part for part in (error.context, error.problem) if part)
        faults.append(Fault(Place(file, line, column), f"is not YAML: {words}{_hint(text, line, words)}"))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        faults.append(Fault(Place(file, line, 1), f"is not YAML: {error.reason}; remove the character"))
    except RecursionError:
        faults.append(Fault(Place(file, 1, 1), "is nested too deeply; no manifest needs that"))
    finally:
        if loader is not None:
            loader.dispose()
    return [document for document in documents if document.data is not None], faults


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of kubectl's."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Keys become text, as in the JSON that kubectl sends."""
        mapping = super().construct_mapping(node, deep=deep)
        return {key if isinstance(key, str) else json.dumps(key, default=str): value for key, value in mapping.items()}


_INT: Final = "tag:yaml.org,2002:int"
_FLOAT: Final = "tag:yaml.org,2002:float"
_DROPPED: Final = frozenset({"tag:yaml.org,2002:timestamp", _INT, _FLOAT, "tag:yaml.org,2002:value"})
_KNOWN_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _DROPPED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _INT, re.compile(r"^[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?$"
        r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def _construct_number(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor(_FLOAT, _construct_number)


def _child(node: yaml.Node, step: Step) -> tuple[yaml.Node | None, yaml.Node] | None:
    """The key's node (None in a list) and the value's; of a key from a merge and its own, the own one."""
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int):
        return (None, node.value[step]) if step < len(node.value) else None
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in reversed(node.value) if key.value == str(step)), None)
    return None


def _node_faults(root: yaml.Node, file: str) -> Iterator[Fault]:
    """Duplicate keys, cycles, tags of the user's own, and documents that aliases blow up."""
    sizes: dict[int, int] = {}
    yield from _walk(root, file, set(), sizes)
    if sizes.get(id(root), 0) > MAX_NODES:
        yield _fault(root, file, f"its aliases stand for more than {MAX_NODES} values; write out fewer")


def _walk(node: yaml.Node, file: str, above: set[int], sizes: dict[int, int]) -> Iterator[Fault]:
    if id(node) in above:
        yield _fault(node, file, "is an alias of something that holds it; write it out without the alias")
        return
    if id(node) in sizes:
        return
    above.add(id(node))
    if node.tag not in _KNOWN_TAGS:
        yield _fault(node, file, f"has the tag {shown(node.tag)}, which kubectl doesn't know; remove it")
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            children.append(value)
            if not isinstance(key, yaml.ScalarNode):
                yield _fault(key, file, "is a list or a map as a key; a key must be text")
            elif key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                first = f"line {seen[key.value]} has it already; remove one of them"
                yield _fault(key, file, f"the key {shown(key.value)} is written twice; {first}")
            else:
                seen[key.value] = key.start_mark.line + 1
    for child in children:
        yield from _walk(child, file, above, sizes)
    sizes[id(node)] = min(MAX_NODES + 1, 1 + sum(sizes.get(id(child), 1) for child in children))
    above.discard(id(node))


def _fault(node: yaml.Node, file: str, message: str) -> Fault:
    return Fault(Place(file, node.start_mark.line + 1, node.start_mark.column + 1), message)


def _split(document: Document) -> Iterator[Document]:
    """The items of a v1 List, as `kubectl get -o yaml` prints it; every other document is itself."""
    data = document.data
    items = data.get("items") if isinstance(data, dict) and data.get("kind") == "List" else None
    found = _child(document.node, "items") if isinstance(items, list) else None
    if items is None or found is None or not isinstance(found[1], yaml.SequenceNode):
        yield document
        return
    for item, node in zip(items, found[1].value, strict=True):
        yield Document(document.file, item, node)


def _json_indent(text: str) -> str:
    """JSON may be indented by tabs, which PyYAML refuses; a string of JSON never goes over a line's end."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    return re.sub(r"^\t+", lambda tabs: " " * len(tabs[0]), text, flags=re.MULTILINE)


def _hint(text: str, line: int, words: str) -> str:
    lines = text.splitlines()
    if line <= len(lines) and "\t" in lines[line - 1]:
        return "; use spaces, not tabs"
    if "expected <block end>" in words or "mapping values are not allowed" in words:
        return "; indent the line as its neighbours, and put text that holds ': ' in quotes"
    return ""
