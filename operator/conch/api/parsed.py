"""Specs parsed once per generation: the tick and the reconcile read them thousands of times. Pure but for its memo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conch.api.inferenceservice import InferenceServiceSpec, InvalidSpec, parse_service

if TYPE_CHECKING:
    from collections.abc import Mapping


class ParsedSpecs:
    """A memo of parse results by uid; a new generation replaces the old one."""

    def __init__(self) -> None:
        self._by_uid: dict[str, tuple[int, InferenceServiceSpec | InvalidSpec]] = {}

    def get(self, service: Mapping[str, Any]) -> InferenceServiceSpec:
        """The parsed spec; raises InvalidSpec (the same one each time) when it is wrong."""
        uid, generation = service["metadata"]["uid"], service["metadata"]["generation"]
        known = self._by_uid.get(uid)
        if known is None or known[0] != generation:
            result: InferenceServiceSpec | InvalidSpec
            try:
                result = parse_service(dict(service))
            except InvalidSpec as error:
                result = error
            known = self._by_uid[uid] = (generation, result)
        if isinstance(known[1], InvalidSpec):
            raise known[1]
        return known[1]

    def forget(self, uid: str) -> None:
        """Drop what is known of a deleted service."""
        self._by_uid.pop(uid, None)
