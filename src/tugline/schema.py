"""Strict decoding of plain values to typed structs, for all input that people write.

Configuration files, task files, API bodies and plug-in options all pass through `decode`. Structs
themselves ignore unknown keys, so that an older reader accepts data of a newer writer. For `decode`
an unknown key is an error that names the nearest known one. All mistakes are reported at once, with
the field's path, its value and the expected value. Bounds are declared in the types, as
``Annotated[int, Meta(ge=1)]``.
"""

import ast
import difflib
import functools
import inspect
import itertools
import re
import reprlib
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta

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
"""Maximum number of mistakes reported at once; the search ends there, also in a huge body."""
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
"""Names of msgspec's types in error texts."""
OTHER_NAMES = {
    "learning_rate": "lr",
    "beta": "kl",
    "kl_coef": "kl",
    "kl_loss_coef": "kl",
    "epsilon": "clip_low",
    "clip_ratio_low": "clip_low",
    "epsilon_high": "clip_high",
    "clip_ratio_high": "clip_high",
    "entropy_coeff": "entropy",
    "loss_type": "loss",
    "num_iterations": "epochs",
    "ppo_epochs": "epochs",
    "adv_estimator": "advantage",
    "reward": "credit",
    "drop_truncated": "truncated",
    "mask_truncated_completions": "truncated",
    "num_generations": "samples",
    "group_size": "samples",
    "n": "samples",
    "max_steps": "steps",
    "total_training_steps": "steps",
    "train_batch_size": "tasks_per_step",
    "batch_size": "tasks_per_step",
    "per_device_train_batch_size": "tasks_per_step",
    "num_train_epochs": "epochs",
    "output_dir": "out",
    "timeout": "agent_s",
    "timeout_s": "agent_s",
    "prompt": "instruction",
    "grader": "evaluator",
    "agent": "harness",
    "sandbox": "runtime",
    "max_grad_norm_clip": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "max_completion_length": "max_tokens",
    "warmup_steps": "warmup_updates",
    "max_async_level": "staleness",
    "model_name_or_path": "model",
}
"""Our names of keys of other trainers (TRL, verl, prime-rl) and of former ones of ours."""
_LOCATION = re.compile(r" - at `((?:key in )?\$[^`]*|key` in `\$[^`]*)`$")
_URL = "'^https?://"
"""Begin of the patterns of URLs in msgspec's texts."""
_EXPECTED = re.compile(r"Expected `([^`]+)`(.*?)(?:, got `?[^`]*`?)?$")


# --------------------------------------------------------------------------- values to structs
def decode(
    values: Any, kind: type[T], *, source: str = "", name: str = "", strict: bool = True
) -> T:
    """Convert `values` to `kind`. Raises one `ConfigError` with all mistakes as `problems`.

    Errors name `source` (a file) and `name` (the field of `values`). Without `strict`, strings are
    accepted for numbers and booleans, as in a query string.
    """
    try:
        decoded = _convert(values, kind, strict=strict)
        if not _lost_keys(values, msgspec.to_builtins(decoded, enc_hook=str)):
            return decoded
    except msgspec.ValidationError:
        pass
    every = _find_problems(values, kind, (name,) if name else (), strict=strict)
    problems = list(itertools.islice(every, MAX_PROBLEMS))
    if problems:
        raise ConfigError.combine(problems, source)
    return decoded  # only defaults that are omitted in encoding were lost


def _convert(value: Any, kind: type[T], *, strict: bool) -> T:
    return msgspec.convert(value, kind, strict=strict, dec_hook=_decode_path)


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is Path:
        raise ValueError("must be a string")
    raise NotImplementedError(kind)


def _lost_keys(value: Any, decoded: Any) -> bool:
    """Whether keys were lost in decoding: unknown keys, or fields omitted in encoding."""
    if isinstance(value, dict) and isinstance(decoded, dict):
        return any(key not in decoded or _lost_keys(value[key], decoded[key]) for key in value)
    both = isinstance(value, list | tuple) and isinstance(decoded, list | tuple)
    return both and any(map(_lost_keys, value, decoded))


def _find_problems(value: Any, kind: Any, path: Location, *, strict: bool) -> Iterator[ConfigError]:
    """Yield unknown keys, then mistakes in the parts of `value`, or else in `value` itself."""
    if value is msgspec.UNSET:
        yield ConfigError(f"{dotted(path)} is missing", dotted(path))
        return
    yield from _find_unknown_keys(value, kind, path)
    problem = None
    for step, part, part_kind in _list_parts(value, kind):
        for problem in _find_problems(part, part_kind, (*path, step), strict=strict):
            yield problem
    if problem is None:
        try:
            _convert(value, kind, strict=strict)
        except msgspec.ValidationError as error:
            yield _explain(error, value, kind, path)


def _find_unknown_keys(value: Any, kind: Any, path: Location) -> Iterator[ConfigError]:
    structs = [each for each in _members(kind) if _is_struct(each)]
    if not structs or not isinstance(value, Mapping):
        return
    known = tuple(field.encode_name for each in structs for field in msgspec.structs.fields(each))
    for name in value:
        if name not in known:
            other = OTHER_NAMES.get(str(name))
            close = [other] if other in known else _find_inside(structs, str(name), other)
            close = close or difflib.get_close_matches(str(name), known, n=1)
            meant = " or ".join(map(repr, close))
            hint = f"did you mean {meant}?" if close else f"known: {', '.join(known)}"
            field = dotted((*path, name))
            yield ConfigError(f"unknown key {field!r}; {hint}", field, known)


def _find_inside(structs: Iterable[Any], name: str, other: str | None) -> list[str]:
    """Return the dotted keys, in parts of the structs, that an unknown key may mean."""
    meant = []
    for each in structs:
        for field in msgspec.structs.fields(each):
            for inner in filter(_is_struct, _members(field.type)):
                names = {part.encode_name for part in msgspec.structs.fields(inner)}
                found = next((key for key in (name, other) if key in names), None)
                if found is not None:
                    meant.append(f"{field.encode_name}.{found}")
    return meant


def _list_parts(value: Any, kind: Any) -> Iterator[tuple[Step, Any, Any]]:
    """Yield key or index, value and type of each part; the value of a missing field is `UNSET`."""
    for each in _members(kind):
        origin = get_origin(each)
        inner = get_args(each)
        if origin in {list, tuple, Sequence} and isinstance(value, list | tuple):
            kinds = inner if origin is tuple and ... not in inner else itertools.repeat(inner[0])
            yield from zip(itertools.count(), value, kinds, strict=False)
        elif origin in {dict, Mapping} and isinstance(value, dict):
            yield from ((name, part, inner[1]) for name, part in value.items())
        elif _is_struct(each) and isinstance(value, Mapping):
            for field in msgspec.structs.fields(each):
                name = field.encode_name
                if field.required or name in value:
                    yield name, value.get(name, msgspec.UNSET), field.type


def _members(kind: Any) -> list[Any]:
    """Return the types of a union without annotations; for another type, the type itself."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin is Annotated:
        return _members(inner[0])
    if origin in {Union, UnionType}:
        return [member for each in inner for member in _members(each)]
    return [kind]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _explain(error: msgspec.ValidationError, value: Any, kind: Any, path: Location) -> ConfigError:
    """Return the error for an invalid value with valid parts."""
    location = _LOCATION.search(str(error))
    reason = _LOCATION.sub("", str(error))
    if isinstance(error.__cause__, ConfigError):  # a struct's own check, which names its field
        return ConfigError(dotted((*path, reason)), dotted((*path, error.__cause__.field)))
    choices = _list_choices(kind)
    must = f"must be one of {', '.join(choices)}" if choices else _describe_expected(reason)
    if location:
        must = f"each {'key' if 'key' in location[1] else 'value'} {must}"
    field = dotted(path)
    return ConfigError(f"{field or 'the body'} is {reprlib.repr(value)}, {must}", field, choices)


def _describe_expected(reason: str) -> str:
    expected = _EXPECTED.match(reason)
    if not expected:
        return reason[:1].lower() + reason[1:].replace("`", "")
    if _URL in expected[2]:
        return "must be a URL such as http://127.0.0.1:8000"
    names = [TYPE_NAMES.get(name, name) for name in expected[1].split(" | ")]
    return f"must be {' or '.join(names)}{expected[2].removesuffix('.0')}"


def _list_choices(kind: Any) -> tuple[str, ...]:
    """Return the values of an enumeration, which may be nullable; none for another type."""
    members = [each for each in _members(kind) if each is not NoneType]
    if len(members) != 1:
        return ()
    if isinstance(members[0], type) and issubclass(members[0], Enum):
        return tuple(str(member.value) for member in members[0])
    literals = get_args(members[0]) if get_origin(members[0]) is Literal else ()
    return tuple(sorted(map(str, literals)))


def dotted(path: Iterable[Step]) -> str:
    """Return a path as text, such as ``limits.agent_s``; steps are cut at 128 characters."""
    return ".".join(str(step)[:128] for step in path)


# --------------------------------------------------------------------------- files to values
class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a repeated key is an error, and ``1e-3`` is a number as in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"key {key.value!r} occurs twice"
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
    msg = f"{path}: file type {path.suffix!r} is not supported; use one of {', '.join(FILE_TYPES)}"
    raise ConfigError(msg)


def parse_json(text: str, source: str) -> Any:
    """Parse JSON. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from error


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location of each line for messages, and its value. Raises `ConfigError`."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json(line, where)


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


def list_structs(annotation: Any) -> list[type[msgspec.Struct]]:
    """List the structs in an annotation, such as `Callback` in ``Callback | None``."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [each for inner in get_args(annotation) for each in list_structs(inner)]


def copy_fields(kind: type[S], *sources: object, **others: object) -> S:
    """Make a struct from the fields of the same names in `sources`, and from `others`.

    If several have a field, the last value is used.
    """
    same = {
        name: getattr(source, name)
        for source in sources
        for name in kind.__struct_fields__
        if hasattr(source, name)
    }
    return kind(**{**same, **others})
