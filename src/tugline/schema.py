"""Strict decoding: plain values into typed structs, for every input that a person writes.

Configuration files, task files, API bodies and plug-in options all pass through `decode`. Structs
themselves are open, so that an older reader accepts what a newer writer sends; what people write
is held to more: an unknown key is an error that names the nearest known one, and every mistake is
reported at once, with the field's path, its value and what would be right. Bounds are declared in
the types, as ``Annotated[int, Meta(ge=1)]``.
"""

import ast
import contextlib
import difflib
import functools
import inspect
import itertools
import re
import reprlib
import textwrap
import tomllib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta
from msgspec import inspect as shapes

from tugline.errors import ConfigError

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
Step = str | int
Location = tuple[Step, ...]

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]

MAX_PROBLEMS = 50
"""Mistakes that are reported at once; a body of millions of them is not searched to its end."""
FILE_TYPES = (".yaml", ".yml", ".toml", ".json")
TYPE_NAMES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
"""What error texts call msgspec's types."""
_PLACE = re.compile(r" - at `((?:key in )?\$[^`]*|key` in `\$[^`]*)`$")
_EXPECTED = re.compile(r"Expected `([^`]+)`(.*?)(?:, got `?[^`]*`?)?$")


# --------------------------------------------------------------------------- values to structs
def decode(
    values: Any, kind: type[T], *, source: str = "", name: str = "", strict: bool = True
) -> T:
    """Convert `values` to `kind`. Raises one `ConfigError`, whose `problems` are all mistakes.

    `source` (a file) and `name` (the field that `values` belong to) stand in errors. Without
    `strict`, texts are accepted for numbers and booleans, as in a query string.
    """
    path: Location = (name,) if name else ()
    problems: list[ConfigError] = []
    with contextlib.suppress(TypeError):  # not hashable, or no type that msgspec knows
        unknown = _find_unknown_keys(values, _key_tree(cast("Hashable", kind)), path)
        problems += itertools.islice(unknown, MAX_PROBLEMS)
    try:
        decoded = msgspec.convert(values, kind, strict=strict, dec_hook=_decode_path)
    except msgspec.ValidationError:
        wrong = _find_wrong_values(values, kind, path, strict=strict)
        problems += itertools.islice(wrong, MAX_PROBLEMS - len(problems))
    if problems:
        raise ConfigError.combine(problems, source)
    return decoded


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is Path:
        raise ValueError("must be a string")
    raise NotImplementedError(kind)


def _find_wrong_values(
    value: Any, kind: Any, path: Location, *, strict: bool
) -> Iterator[ConfigError]:
    """Yield what is wrong in the parts of `value`, each converted by itself; else in itself."""
    if value is msgspec.UNSET:
        yield ConfigError(f"{dotted(path)} is missing", dotted(path))
        return
    try:
        msgspec.convert(value, kind, strict=strict, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        problem = None
        for step, part, part_kind in _list_parts(value, kind):
            for problem in _find_wrong_values(part, part_kind, (*path, step), strict=strict):
                yield problem
        if problem is None:
            yield _explain(error, value, kind, path)


def _list_parts(value: Any, kind: Any) -> Iterator[tuple[Step, Any, Any]]:
    """The parts of a value: name or number, the part, its type. `UNSET` for a missing field."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in {Annotated, Union, UnionType}:
        for each in inner[:1] if origin is Annotated else inner:
            yield from _list_parts(value, each)
    elif origin in {list, tuple, Sequence} and isinstance(value, list | tuple):
        kinds = inner if origin is tuple and ... not in inner else itertools.repeat(inner[0])
        for number, (part, part_kind) in enumerate(zip(value, kinds, strict=False)):
            yield number, part, part_kind
    elif origin in {dict, Mapping} and isinstance(value, dict):
        for name, part in value.items():
            yield name, part, inner[1]
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, Mapping):
        for field in msgspec.structs.fields(kind):
            name = field.encode_name
            if field.required or name in value:
                yield name, value.get(name, msgspec.UNSET), field.type


def _explain(error: msgspec.ValidationError, value: Any, kind: Any, path: Location) -> ConfigError:
    """What is wrong with a value whose parts, if it has any, are right by themselves."""
    place = _PLACE.search(str(error))
    reason = _PLACE.sub("", str(error))
    if isinstance(error.__cause__, ConfigError):  # a struct's own check, which names its field
        return ConfigError(dotted((*path, reason)), dotted((*path, error.__cause__.field)))
    choices = _list_choices(kind)
    must = f"must be one of {', '.join(choices)}" if choices else _say_expected(reason)
    if place:
        must = f"each {'key' if 'key' in place[1] else 'value'} {must}"
    field = dotted(path)
    return ConfigError(f"{field or 'the body'} is {reprlib.repr(value)}, {must}", field, choices)


def _say_expected(reason: str) -> str:
    expected = _EXPECTED.match(reason)
    if not expected:
        return reason[:1].lower() + reason[1:].replace("`", "")
    names = [TYPE_NAMES.get(name, name) for name in expected[1].split(" | ")]
    return f"must be {' or '.join(names)}{expected[2].removesuffix('.0')}"


def _list_choices(kind: type) -> tuple[str, ...]:
    """The values of an enumeration; none of another type."""
    match strip_null(shapes.type_info(kind)):
        case shapes.EnumType(cls=cls):
            return tuple(str(member.value) for member in cls)
        case shapes.LiteralType(values=literals):
            return tuple(map(str, literals))
    return ()


def strip_null(shape: shapes.Type) -> shapes.Type:
    """`shape` without "or null"."""
    if isinstance(shape, shapes.UnionType):
        others = [each for each in shape.types if not isinstance(each, shapes.NoneType)]
        return others[0] if len(others) == 1 else shape
    return shape


def dotted(path: Iterable[Step]) -> str:
    """A path as one name, such as ``limits.agent_s``; steps are cut at 128 characters."""
    return ".".join(str(step)[:128] for step in path)


# --------------------------------------------------------------------------- unknown keys
def _find_unknown_keys(value: Any, tree: Any, path: Location) -> Iterator[ConfigError]:
    """Compare keys with `tree`: a dict of known keys, a tuple of one tree for each item, or None.

    The key ``"*"`` stands for any key.
    """
    if isinstance(tree, dict) and isinstance(value, dict):
        for name, inner in value.items():
            if name not in tree and "*" not in tree:
                yield _unknown_key(str(name), tuple(tree), path)
            below = tree.get(name, tree.get("*"))
            if below is not None:
                yield from _find_unknown_keys(inner, below, (*path, name))
    elif isinstance(tree, tuple) and isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _find_unknown_keys(inner, tree[0], (*path, number))


def _unknown_key(name: str, known: tuple[str, ...], path: Location) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
    field = dotted((*path, name))
    return ConfigError(f"unknown key {field!r}; {hint}", field, known)


@functools.cache
def _key_tree(kind: Hashable) -> Any:
    return _build_key_tree(shapes.type_info(kind))


def _build_key_tree(shape: shapes.Type) -> Any:
    match strip_null(shape):
        case shapes.StructType(fields=fields):
            return {field.encode_name: _build_key_tree(field.type) for field in fields}
        case shapes.ListType(item_type=inner) | shapes.VarTupleType(item_type=inner):
            below = _build_key_tree(inner)
            return None if below is None else (below,)
        case shapes.DictType(value_type=inner):
            below = _build_key_tree(inner)
            return None if below is None else {"*": below}
    return None


# --------------------------------------------------------------------------- files to values
class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a repeated key is an error, and ``1e-3`` is a number as in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"key {key.value!r} stands twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_text(path: Path) -> str:
    """Read a UTF-8 file, with or without a byte order mark. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_values(path: Path) -> Any:
    """Read a YAML, TOML or JSON file; None if a YAML file is empty. Raises `ConfigError`."""
    text = read_text(path)
    match path.suffix.lower():
        case ".json":
            return parse_json(text, str(path))
        case ".toml":
            try:
                return tomllib.loads(text)
            except tomllib.TOMLDecodeError as error:
                raise ConfigError(f"{path} is not valid TOML: {error}") from error
        case ".yaml" | ".yml":
            return _parse_yaml(text, str(path))
    msg = f"{path}: file type {path.suffix!r} is unknown; use one of {', '.join(FILE_TYPES)}"
    raise ConfigError(msg)


def parse_json(text: str, source: str) -> Any:
    """Parse JSON. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from error


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{source} is not valid YAML: {error.problem}{where}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error


# --------------------------------------------------------------------------- fields
@functools.cache
def field_docs(kind: type) -> Mapping[str, str]:
    """Read the docstring under each field, also of base classes, as one line of Markdown."""
    docs: dict[str, str] = {}
    for base in kind.__bases__:
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            docs.update(field_docs(base))
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    for field, below in itertools.pairwise(node.body if isinstance(node, ast.ClassDef) else []):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.replace("``", "`").split())
    return docs


def describe_structs(kinds: Iterable[Any], ref_template: str) -> dict[str, Any]:
    """JSON schemas of all structs in these types, by name, with the docstrings of their fields."""
    waiting = [struct for kind in kinds for struct in list_structs(kind)]
    _, schemas = msgspec.json.schema_components(waiting, ref_template=ref_template)
    seen = set()
    while waiting:
        struct = waiting.pop()
        if struct in seen:
            continue
        seen.add(struct)
        for name, text in field_docs(struct).items():
            schemas[struct.__name__]["properties"][name].setdefault("description", text)
        for field in msgspec.structs.fields(struct):
            waiting += list_structs(field.type)
    return schemas


def list_structs(annotation: Any) -> list[type[msgspec.Struct]]:
    """Every struct inside an annotation, such as that of ``Callback | None``."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [each for inner in get_args(annotation) for each in list_structs(inner)]


def copy_fields(kind: type[S], *sources: object, **others: object) -> S:
    """Make a struct of `others` and of the fields that `sources` have under the same names.

    Where several have a field, the last one of them counts.
    """
    same = {
        name: getattr(source, name)
        for source in sources
        for name in kind.__struct_fields__
        if hasattr(source, name)
    }
    return kind(**{**same, **others})
