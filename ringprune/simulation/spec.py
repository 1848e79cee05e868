"""What a method is called on the command line: a policy's name, and arguments of its function.

``iwp:density=0.04,roots=all,warmup=200``. Arguments are those of the function in
:data:`ringprune.policies.POLICIES`, found by its signature, so that new policies and arguments need nothing here. Where
one takes a record, a plain value is its first field and others follow a dot: ``warmup=200,warmup.start=0.25``.
``MODULE:FUNCTION`` in place of the name is a function of the user's own, whose arguments are found in the same way.
"""

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ringprune.errors import ConfigurationError, RingPruneError
from ringprune.local_steps import LocalSteps
from ringprune.policies import POLICIES, Policy
from ringprune.simulation.makers import OWN, divided, is_own, made, maker

__all__ = ["OPTIONS", "Spec", "parse", "policy_of", "renewed"]

OPTIONS = {"flush": "1: send all residuals at the end, before the model is judged; counted"}
"""What a specification may say besides a policy's arguments: what is done with the wrapper around training."""

WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Spec:
    """A method: a policy's name, arguments that are not left at their defaults, and the battery's own options.

    Attributes:
        name: the policy's, or ``MODULE:FUNCTION``.
        arguments: of the policy's function, ordered by name.
        flush: send all residuals at the end.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()
    flush: bool = False

    def __str__(self) -> str:
        """Short: only what is said."""
        return self._text(dict(self.arguments))

    @property
    def resolved(self) -> str:
        """With the defaults that the policy has now, so that runs made under other defaults are other runs."""
        defaults = {key: p.default for key, p in _parameters(self.name).items() if _is_plain(p.default)}
        return self._text(defaults | dict(self.arguments))

    def _text(self, values: Mapping[str, Any]) -> str:
        words = [word for key in sorted(values) for word in _words(key, values[key])]
        words += ["flush=1"] if self.flush else []
        return ":".join([self.name, ",".join(words)] if words else [self.name])

    def with_(self, **arguments: Any) -> "Spec":
        """The same with some arguments set, for example ``density``."""
        values = _without_defaults(self.name, dict(self.arguments) | arguments)
        return dataclasses.replace(self, arguments=values)

    def exchanging_every(self, steps: int) -> "Spec":
        """The same with ``steps`` local steps between two exchanges; other choices for them stay."""
        now = dict(self.arguments).get("local_steps")
        return self.with_(local_steps=dataclasses.replace(now, count=steps) if isinstance(now, LocalSteps) else steps)

    def without(self, *names: str) -> "Spec":
        """The same with some arguments left at their defaults."""
        return dataclasses.replace(self, arguments=tuple(pair for pair in self.arguments if pair[0] not in names))

    @property
    def warms_up(self) -> bool:
        """Whether it has a warm-up."""
        return any(key == "warmup" for key, _ in self.arguments)

    @property
    def fixes_density(self) -> bool:
        """Whether it says one."""
        return any(key == "density" for key, _ in self.arguments)

    def accepts(self, argument: str) -> bool:
        """Whether the policy's function has this argument."""
        return argument in _parameters(self.name)

    def policy(self) -> Policy:
        """The policy.

        Raises:
            ConfigurationError, ArgumentTypeError: a value cannot work.
        """
        return made(self.name, dict(self.arguments))


def parse(text: str) -> Spec:
    """Read a specification.

    Raises:
        ConfigurationError: no policy has that name, or it has no such argument; the message lists what there is.
        ArgumentTypeError: a value of another type is needed.
    """
    name, rest = divided(text)
    if not is_own(name):
        _check("policy", name, list(POLICIES), f"the policies are {OWN}, of your own, and")
    words: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in rest.split(","))):
        if ":" in word:
            raise ConfigurationError(f"{text!r}: arguments stand behind one colon, with commas between them")
        key, equals, value = (part.strip() for part in word.partition("="))
        _check(f"{name}: argument", key.partition(".")[0], [*_parameters(name), *OPTIONS], f"{name} takes")
        if not equals or not value:
            raise ConfigurationError(f"{text!r}: {key!r} needs a value, as in {key}=...")
        if key in words:
            raise ConfigurationError(f"{text!r}: {key!r} is given twice")
        words[key] = value
    flush = words.pop("flush", "0")
    if flush not in ("0", "1"):
        raise ConfigurationError(f"{text!r}: flush={flush}: 0 or 1")
    hints = _hints(name)
    keys = dict.fromkeys(word.partition(".")[0] for word in words)
    values = {key: _value(name, key, words, hints.get(key, Any)) for key in keys}
    spec = Spec(name, _without_defaults(name, values), flush == "1")
    spec.policy()
    return spec


def policy_of(text: str) -> Policy:
    """The policy of a specification, where nothing is trained to an end.

    Raises:
        ConfigurationError, ArgumentTypeError: as :func:`parse`; or it says what is done at the end of training.
    """
    spec = parse(text)
    if spec.flush:
        raise ConfigurationError(
            f"{text!r}: flush is what ringprune simulate does at the end of training; leave it out"
        )
    return spec.policy()


@cache
def renewed(resolved: str) -> str:
    """A resolved specification of an earlier version as it is now.

    An argument that it does not name did not exist then, and has its default: new arguments change nothing. What can no
    longer be read stays as it is, and what a user's function made: reading a store runs no code of theirs.
    """
    if is_own(divided(resolved)[0]):
        return resolved
    try:
        return parse(resolved).resolved
    except RingPruneError:
        return resolved


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    """Arguments of a policy's function."""
    return inspect.signature(maker(name)).parameters


def _hints(name: str) -> Mapping[str, Any]:
    """Types of a policy's arguments."""
    try:
        return typing.get_type_hints(maker(name))
    except (NameError, TypeError) as error:  # a user's: it names what is imported for checkers alone, or is no function
        raise ConfigurationError(f"policy {name!r}: its annotations cannot be read: {error}") from error


def _is_plain(default: Any) -> bool:
    """Whether a default can be written as words."""
    return default is None or isinstance(default, bool | int | float | str) or dataclasses.is_dataclass(default)


def _without_defaults(name: str, values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    defaults = {key: parameter.default for key, parameter in _parameters(name).items()}
    return tuple(sorted((key, value) for key, value in values.items() if value != defaults[key]))


def _check(what: str, word: str, known: list[str], introduction: str) -> None:
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(f"{what} {word!r}: {introduction} {', '.join(known)}{hint}")


# -- words and values -------------------------------------------------------------------------------------------------


def _words(key: str, value: Any) -> Iterator[str]:
    """A value as words that :func:`parse` reads."""
    if not dataclasses.is_dataclass(value):
        yield f"{key}={str(value).lower() if value is None or isinstance(value, bool) else value}"
        return
    first, *others = dataclasses.fields(value)
    yield f"{key}={getattr(value, first.name)}"
    for field in others:
        if getattr(value, field.name) != field.default:
            yield from _words(f"{key}.{field.name}", getattr(value, field.name))


def _value(policy: str, key: str, words: Mapping[str, str], hint: Any) -> Any:
    """A word as a value of the type that the argument is annotated with; a record where its fields are named."""
    allowed = typing.get_args(hint) or (hint,)
    fields = {name.partition(".")[2]: _literal(word) for name, word in words.items() if name.startswith(f"{key}.")}
    first = _literal(words[key]) if key in words else None
    if bool in allowed and first in (0, 1):
        return bool(first)
    if float in allowed and type(first) is int and int not in allowed:
        return float(first)
    record: Any = next((kind for kind in allowed if dataclasses.is_dataclass(kind)), None)
    if fields and record is None:
        raise ConfigurationError(f"{policy}: {key}.{next(iter(fields))}: {key} has no fields")
    if record is None or not (fields or (first is not None and type(first) not in allowed)):
        return first
    known = [field.name for field in dataclasses.fields(record)]
    for name in fields:
        _check(f"{policy}: {key}: field", name, known, f"{key} is a {record.__name__} of")
    if first is not None and known[0] in fields:
        raise ConfigurationError(f"{policy}: {key} and {key}.{known[0]} are the same: give one")
    if first is None and known[0] not in fields and dataclasses.fields(record)[0].default is dataclasses.MISSING:
        raise ConfigurationError(f"{policy}: {key}.{next(iter(fields))} needs {key} too, as in {key}=4")
    return record(*([] if first is None else [first]), **fields)


def _literal(word: str) -> Any:
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
