"""Defines the settings of a server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from widepack.errors import UsageError

MEGABYTE = 1_000_000
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[!-.0-~]+", re.ASCII)
_BODIES = 4
"""How many of the largest bodies may be received at once, unless a setting says how many bytes."""


@dataclass(frozen=True)
class Settings:
    """What a server is started with.

    Attributes:
        artifacts: The path of each artifact by its name on the wire.
        outputs: The outputs of a model of all members, such as `logits.mean`; empty for the answers.
        of: What figures are computed of: `softmax`, `sigmoid`, `probabilities`; None for the answers.
        dim: The dim of the classes in a member's answer.
        calibrated: Whether figures are calibrated, as `ens.reduce` takes it.
        members: Whether each member is a model, too.
        max_batch: The most rows of a batch.
        max_delay: Seconds for which a batch that is not full waits.
        max_queue: The most rows that wait. A request of more rows than a batch counts as one batch.
        max_rows: The most rows of a request.
        max_values: The most numbers of all inputs of a request.
        max_answer: The most bytes of an answer.
        max_sending: The most bytes of large answers that clients have not read; None for twice
            `max_answer`.
        send_timeout: Seconds in which a client must read some of its answer.
        max_body: The most bytes of a body, also once unpacked.
        max_receiving: The most bytes of all bodies that have arrived in part; None for four times `max_body`.
        timeout: Seconds for which a request may wait.
        receive_timeout: Seconds in which the head of a request must arrive, and after it its body.
        inline: Seconds of a batch up to which it runs on the thread of the event loop.
        threads, device, backend, dtype, memory, weights, max_error, graph: As `widepack.load` takes them.
        token_file: The file of the token that every request needs; None for no token.
        admin_token_file: The file of the token for swaps; None forbids them.
        swap_from: The only folder of checkpoints that swaps may name; None: a swap sends its checkpoint.
        tokenizer: The folder of a tokenizer, which makes the inputs of texts; None for none.
        cors: The origins whose pages may call the server from a browser; `*` for any.
        reload: Seconds between two looks for a new artifact at the path; 0 for none.
        drain: Seconds for which the server still answers after SIGTERM.
        hang: Seconds without progress after which the server says that it is not alive.
        metrics_by_member: Whether members are labels of metrics; None: if there are at most 100.
    """

    artifacts: Mapping[str, str]
    outputs: tuple[str, ...] = ()
    of: str | None = None
    dim: int = -1
    calibrated: bool = False
    members: bool = True
    max_batch: int = 64
    max_delay: float = 0.0
    max_queue: int = 1024
    max_rows: int = 1 << 16
    max_values: int = 1 << 24
    max_answer: int = 64 * MEGABYTE
    max_sending: int | None = None
    send_timeout: float = 30.0
    max_body: int = 64 * MEGABYTE
    max_receiving: int | None = None
    timeout: float = 30.0
    receive_timeout: float = 60.0
    inline: float = 0.5e-3
    threads: int | None = None
    device: str | None = None
    backend: str = "auto"
    dtype: str | None = None
    memory: str = "auto"
    weights: str | None = None
    max_error: float | None = None
    graph: bool | str = False
    token_file: str | None = None
    admin_token_file: str | None = None
    swap_from: str | None = None
    tokenizer: str | None = None
    cors: tuple[str, ...] = ()
    reload: float = 0.0
    drain: float = 5.0
    hang: float = 60.0
    metrics_by_member: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_rows", "max_values", "max_body", "max_answer"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it is at least 1")
        if self.most_receiving < self.max_body:
            raise UsageError(
                f"max_receiving is {self.max_receiving}, and max_body is {self.max_body}: no body of that "
                "size could be received; make max_receiving at least max_body"
            )
        if self.most_sending < self.max_answer:
            raise UsageError(
                f"max_sending is {self.max_sending}, and max_answer is {self.max_answer}: no answer of that "
                "size could be sent; make max_sending at least max_answer"
            )
        for origin in self.cors:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"cors: {origin!r} is not an origin without a path, such as https://app.example.org, or *"
                )
        for name in ("timeout", "receive_timeout", "send_timeout", "hang"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it is a number of seconds above 0")
        for name in ("max_delay", "inline", "reload", "drain"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it is a number of seconds from 0")

    @property
    def most_receiving(self) -> int:
        """The most bytes of all bodies that have arrived in part."""
        return _BODIES * self.max_body if self.max_receiving is None else self.max_receiving

    @property
    def most_sending(self) -> int:
        """The most bytes of large answers that clients have not read."""
        return 2 * self.max_answer if self.max_sending is None else self.max_sending

    def to_json(self) -> dict[str, Any]:
        """Returns the settings for another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """Returns the settings that `to_json` wrote."""
        return replace(cls({}), **{**data, "outputs": tuple(data["outputs"]), "cors": tuple(data["cors"])})


def named_artifacts(words: list[str]) -> dict[str, str]:
    """Reads `ens.wide` and `name=path.wide`. Returns: the path of each artifact by its name.

    The name of a path is that of its folder without its suffix. Raises: UsageError for a name that occurs
    twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or "/" in name:
            name, path = Path(word).absolute().name.removesuffix(".wide"), word
        if not name or not path:
            raise UsageError(f"{word!r} is neither the path of an artifact nor NAME=PATH")
        if name in found:
            raise UsageError(f"two artifacts have the name {name}; give one another name: NAME={path}")
        found[name] = path
    return found


def token_of(path: str | None, option: str) -> str | None:
    """Returns the token in a file, without white space around it; None for no file. Raises: UsageError."""
    if path is None:
        return None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{option} {path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise UsageError(f"{option} {path}: a token is at least 16 printable ASCII characters")
    return token
