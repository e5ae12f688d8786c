"""Checked attributes in nested categories, like those of the SDK's configuration: strict types, declared names only."""

from __future__ import annotations

import difflib
import enum
import json
import logging
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union


class AttributeMetadata:
    """The metadata of one attribute; see `Settings.get_attribute_metadata`."""

    def __init__(self, name: str, kind: Any, default: Any, doc: str, deprecated_msg: Optional[str] = None) -> None:
        self.name = name
        self.type = kind
        self.default = default
        self.deprecated = deprecated_msg is not None
        self.deprecated_msg = deprecated_msg
        self.__doc__ = doc

    def check_type(self, value: Any) -> None:
        """Raises TypeError unless the value's type is exactly one of those that the attribute takes."""
        if not _is_exactly(value, self.type):
            raise TypeError(
                f"Trying to set {self.name} to {value!r} of type {type(value).__name__}, but it must be of type "
                f"{_type_name(self.type)}."
            )

    def warn_if_deprecated(self) -> None:
        """Logs a warning for a deprecated attribute."""
        if self.deprecated:
            logging.getLogger("tensorflow").warning("%s is deprecated: %s", self.name, self.deprecated_msg)


class Attribute:
    """Declares an attribute in the body of a `Settings` class."""

    def __init__(self, kind: Any, default: Any, doc: str = "", deprecated_msg: Optional[str] = None) -> None:
        self.kind, self.default, self.doc, self.deprecated_msg = kind, default, doc, deprecated_msg


class Settings:
    """A category: attributes declared with `Attribute`, and nested categories that are `Settings` classes."""

    _metadata: Dict[str, AttributeMetadata]
    _categories: Dict[str, Settings]
    _values: Dict[str, Any]

    def __init__(self) -> None:
        self._declare("")

    def _declare(self, prefix: str) -> None:
        """Makes what the class declares, with its default values. The prefix is that of the category's full name."""
        metadata: Dict[str, AttributeMetadata] = {}
        categories: Dict[str, Settings] = {}
        for name, declared in vars(type(self)).items():
            if isinstance(declared, Attribute):
                metadata[name] = AttributeMetadata(
                    prefix + name, declared.kind, declared.default, declared.doc, declared.deprecated_msg
                )
            elif isinstance(declared, type) and issubclass(declared, Settings):
                categories[name] = declared.__new__(declared)
                categories[name]._declare(f"{prefix}{name}.")
        object.__setattr__(self, "_metadata", metadata)
        object.__setattr__(self, "_categories", categories)
        object.__setattr__(self, "_values", {name: _copy(entry.default) for name, entry in metadata.items()})

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        values = object.__getattribute__(self, "_values")
        if name in values:
            self._metadata[name].warn_if_deprecated()
            return values[name]
        categories = object.__getattribute__(self, "_categories")
        if name in categories:
            return categories[name]
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        raise self._unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._categories:
            raise Exception(f"{name} is a category of attributes and cannot be set; set the attributes in it.")
        if name not in self._metadata:
            raise self._unknown(name)
        metadata = self._metadata[name]
        metadata.check_type(value)
        metadata.warn_if_deprecated()
        self._values[name] = value

    def __deepcopy__(self, memo: Dict[int, Any]) -> Settings:
        copy = type(self)()
        for mine, other in zip(self._tree(), copy._tree()):
            other[0]._values[other[1]] = _copy(mine[0]._values[mine[1]])
        return copy

    def __str__(self) -> str:
        """Returns all attributes with their values, one in a line."""
        return "\n".join(f"{owner._metadata[name].name} = {owner._values[name]}" for owner, name in self._tree())

    def to_dict(self) -> Dict[str, Any]:
        """Returns all attributes by their full, dotted names; enums as integers."""
        return {owner._metadata[name].name: _plain(owner._values[name]) for owner, name in self._tree()}

    def from_dict(self, dct: Dict[str, Any]) -> None:
        """Sets the attributes that a dictionary of `to_dict` has. Keys that are not attributes are ignored."""
        for owner, name in self._tree():
            metadata = owner._metadata[name]
            if metadata.name in dct:
                setattr(owner, name, _restore(dct[metadata.name], metadata.type))

    def to_json(self) -> str:
        """Returns `to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def from_json(self, json_cfg: str) -> None:
        """Sets the attributes from the text of `to_json`."""
        self.from_dict(json.loads(json_cfg))

    def get_attribute_metadata(self, attr: str) -> AttributeMetadata:
        """Returns the metadata of an attribute, by its name or dotted name."""
        category, _, rest = attr.partition(".")
        if rest and category in self._categories:
            return self._categories[category].get_attribute_metadata(rest)
        if attr not in self._metadata:
            raise self._unknown(attr)
        return self._metadata[attr]

    def _tree(self) -> Iterator[Tuple[Settings, str]]:
        for name in self._metadata:
            yield self, name
        for category in self._categories.values():
            yield from category._tree()

    def _unknown(self, name: str) -> ValueError:
        known = [*self._metadata, *self._categories, *(owner._metadata[leaf].name for owner, leaf in self._tree())]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        return ValueError(f"'{name}' is not a valid attribute of this config. Did you mean '{near[0]}'?")


def _is_exactly(value: Any, kind: Any) -> bool:
    origin: Any = getattr(kind, "__origin__", None)
    arguments: Sequence[Any] = getattr(kind, "__args__", ())
    if origin is Union:
        return any(_is_exactly(value, argument) for argument in arguments)
    if origin in (list, List):
        return type(value) is list and all(_is_exactly(entry, arguments[0]) for entry in value)
    if origin in (tuple, Tuple):
        return type(value) is tuple and all(_is_exactly(entry, arguments[0]) for entry in value)
    return type(value) is kind


def _type_name(kind: Any) -> str:
    arguments = getattr(kind, "__args__", ())
    if getattr(kind, "__origin__", None) is Union:
        return " or ".join(map(_type_name, arguments))
    return kind.__name__ if isinstance(kind, type) and not arguments else str(kind).replace("typing.", "")


def _copy(value: Any) -> Any:
    return type(value)(value) if isinstance(value, (list, dict)) else value


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else _copy(value)


def _restore(value: Any, kind: Any) -> Any:
    return kind(value) if isinstance(kind, type) and issubclass(kind, enum.Enum) else _copy(value)
