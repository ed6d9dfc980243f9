"""Answers requests, for REST and gRPC: finds the model, checks the request, waits for its batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator
from functools import partial
from pathlib import Path

from widepack.errors import UsageError, WidepackError
from widepack.inference.model import WideModel, swap_together
from widepack.spec.dtypes import dtype_of
from widepack.system.memory import give_back

from ..batching.batcher import Batcher
from ..batching.job import Job
from ..batching.options import BatchOptions
from ..catalog.call import CallChecker, RequestLimits
from ..catalog.catalog import Catalog
from ..catalog.outputs import Defaults
from ..catalog.served import ONE, ServedArtifact, ServedModel
from ..catalog.texts import IDS, TEXT, TextInput
from ..errors import Busy, Conflict, Forbidden, RequestError
from ..metrics import Metrics
from ..protocol.request import InferRequest
from ..protocol.response import AnsweredOutput
from ..protocol.work import Work
from ..settings import Settings, token_of
from .collector import settle_again
from .desk import Desk
from .loading import digest_of, loaded, ready_artifact
from .receiving import Receiving
from .sending import Sending
from .swaps import SwapOrder, SwapResult, checkpoint_in
from .threads import Threads

log = logging.getLogger("widepack.serve")
TICK = 0.1
"""Seconds between two looks at deadlines."""
GIVE_BACK_S = 2.0
"""The fewest seconds between two returns of freed memory to the system."""
_WIDER, _MORE_BYTES = 2, 1 << 20
"""The checkpoint of a request may have twice the bytes of a member's weights, as in a wider dtype, and a
megabyte for names and for what is left out.
"""
_SHORT = 1 << 12
"""The most characters of texts that are tokenized on the event loop."""
CANCELLED = 499
"""The code in the metrics of a request that its client cancelled."""


class Service:
    """All that a server does, without a wire.

    Args:
        settings: What the server is started with.
        models: Loaded models by name, in the place of those that `settings.artifacts` names.

    Attributes:
        settings: As given.
        catalog: The models on the wire.
        metrics: What happened.
        receiving: The bodies that have arrived and are not read.
        sending: The large answers that clients have not read.
        checker: Compares requests with models.
        desk: Reads and writes large bodies beside the event loop.
        draining: Whether it takes no new requests.
        token: The token that every request needs; None for none.
        admin_token: The token for swaps; None: they are forbidden.
        swap_in_all: Replaces a member in all processes of a server; None if this is the only one.

    Raises:
        WidepackError: An artifact cannot be loaded or served.
    """

    def __init__(self, settings: Settings, models: dict[str, WideModel] | None = None) -> None:
        self.settings = settings
        self.token = token_of(settings.token_file, "token-file")
        self.admin_token = token_of(settings.admin_token_file, "admin-token-file")
        self.metrics = Metrics(settings.metrics_by_member)
        self.receiving = Receiving(settings.most_receiving, lambda: self.metrics.rejected("receiving_full"))
        given = models or {}
        artifacts = [ready_artifact(n, m, settings) for n, m in given.items()]
        artifacts += [
            ready_artifact(n, loaded(settings, p), settings)
            for n, p in settings.artifacts.items()
            if n not in given
        ]
        if not artifacts:
            raise UsageError("there is nothing to serve: name an artifact")
        self.catalog = Catalog(artifacts, members=settings.members)
        if not len(self.catalog):
            raise UsageError(
                "there is nothing to serve: the members answer in different shapes, so only the "
                "models of single members can be served, and they are switched off"
            )
        for artifact in artifacts:
            self.metrics.describe(artifact)
        texts = None if settings.tokenizer is None else TextInput(settings.tokenizer)
        if texts is not None and not any(texts.reads(model.layout) for model in self.catalog):
            raise UsageError(f"--tokenizer: no model has an input {IDS}, which a tokenizer makes of texts")
        options = BatchOptions(
            settings.max_batch,
            settings.max_queue,
            max_delay=settings.max_delay,
            inline=settings.inline,
            threads=settings.threads,
            max_answer=settings.max_answer,
        )
        self.batcher = Batcher(options, self.metrics)
        self.checker = CallChecker(
            Defaults(settings.outputs, settings.of, settings.dim, settings.calibrated),
            RequestLimits(settings.max_rows, settings.max_values),
            texts,
        )
        self.sending = Sending(settings.most_sending, lambda: self.metrics.rejected("sending_full"))
        self.desk = Desk()
        self.draining = False
        self.swap_in_all: Callable[[SwapOrder], Awaitable[SwapResult]] | None = None
        self._changing = asyncio.Lock()
        self._uploads = False
        self._threads = Threads()
        self._reloads: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._retired: list[ServedArtifact] = []
        self._give_back_at = 0.0

    # ---------------------------------------------------------------- requests

    async def infer(
        self,
        model: ServedModel,
        request: InferRequest,
        delayed: Callable[[Job], None] | None = None,
        client: Hashable = "",
    ) -> list[AnsweredOutput]:
        """Runs a request.

        Args:
            model: The model that it names.
            request: The request.
            delayed: Is called with the job if it waits for long. The caller may cancel it.
            client: Who sent it.

        Returns:
            The outputs.

        Raises:
            RequestError: It is refused.
        """
        start = time.monotonic()
        code = 500
        try:
            call = self.checker.call(model, await self._with_tokens(model, request))
            timeout = (
                self.settings.timeout
                if request.timeout is None
                else min(request.timeout, self.settings.timeout)
            )
            outputs = await self.batcher.outputs(call, timeout, delayed, client)
            code = 200
            binary = {o.name: o.binary for o in request.outputs}
            return [
                AnsweredOutput(w.name, value, binary.get(w.name, request.binary))
                for w, value in zip(call.wanted, outputs)
            ]
        except RequestError as e:
            code = e.status
            raise
        except asyncio.CancelledError:
            code = CANCELLED
            raise
        finally:
            self.metrics.answered(model, code, time.monotonic() - start)

    async def _with_tokens(self, model: ServedModel, request: InferRequest) -> InferRequest:
        """Returns a request with tokens in the place of its texts: of long ones on a thread."""
        texts = request.inputs.get(TEXT)
        tokenize = partial(self.checker.with_tokens, model, request)
        if not isinstance(texts, list) or sum(map(len, texts)) <= _SHORT:
            return tokenize()
        return await self.desk.run(Work(), tokenize)

    # ---------------------------------------------------------------- health

    @property
    def live(self) -> bool:
        """Whether the inference thread moves."""
        return self.batcher.seconds_without_progress < self.settings.hang

    @property
    def ready(self) -> bool:
        """Whether the server takes requests. All artifacts are loaded since its start."""
        return not self.draining and self.live

    def metrics_text(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        self._show_gauges()
        return self.metrics.text()

    def _show_gauges(self) -> None:
        self.metrics.queue_rows.set(self.batcher.waiting)
        self.metrics.ready.set(self.ready)

    # ---------------------------------------------------------------- changes

    async def swap(self, name: str, checkpoint: str) -> str:
        """Replaces a member by a checkpoint, while calls go on.

        Args:
            name: The name of the member's model on the wire.
            checkpoint: The path of the checkpoint, relative to the folder of the settings.

        Returns:
            A sentence about the swap.

        Raises:
            RequestError: There is no such model, or the path or the checkpoint is refused.
        """
        self._one_member(name)
        folder = self.settings.swap_from
        if folder is None:
            raise Forbidden(
                "names of checkpoints are not allowed: start the server with --swap-from, or send the "
                "checkpoint as a safetensors file with Content-Type: application/octet-stream"
            )
        return await self.swap_file(name, checkpoint_in(Path(folder), checkpoint), checkpoint)

    async def swap_file(self, name: str, path: Path, title: str) -> str:
        """Replaces a member by a checkpoint at any path. title: of the checkpoint, in the sentence.

        Returns: a sentence about the swap. Raises: RequestError.
        """
        model = self._one_member(name)
        artifact = model.artifact
        order = SwapOrder(artifact.name, artifact.model.manifest.digest, model.member, str(path), title)
        try:
            done = await (self.swap_in_all or self.swap_here)(order)
        except Conflict:
            self.metrics.swapped(None)
            raise
        self.metrics.swapped(done.pause)
        void = "; the calibration no longer counts" if done.uncalibrated else ""
        return f"{model.name} is now {title}{void}"

    async def swap_here(self, order: SwapOrder, agreed: Callable[[], None] = lambda: None) -> SwapResult:
        """Replaces a member in this process.

        agreed: as `swap_together` takes it. It is called on a thread. Raises: RequestError.
        """
        async with self._changing:
            artifact = self.catalog.artifacts[order.artifact]
            model, path = artifact.model, order.path
            if model.manifest.digest != order.digest:
                raise Busy(f"a new artifact of {artifact.name} was loaded meanwhile; try again")
            try:
                done = await asyncio.to_thread(swap_together, model, order.member, Path(path), agreed)
            except WidepackError as e:
                text = str(e).replace(f"checkpoint {path}", order.title)
                raise Conflict(text.replace(path, order.title)) from None
        log.info("member %s of %s was replaced", done.member, artifact.name)
        return SwapResult(done.pause, done.uncalibrated)

    def swap_again(self, order: SwapOrder) -> None:
        """Replaces a member before the start, as other processes of this server did while they served.

        An artifact that they do not serve stays as it is. Raises: WidepackError.
        """
        model = self.catalog.artifacts[order.artifact].model
        if model.manifest.digest == order.digest:
            model.swap(order.member, order.path)

    def _one_member(self, name: str) -> ServedModel:
        """Returns the model of one member. Raises: RequestError."""
        model = self.catalog.find(name)
        if model.kind != ONE:
            raise RequestError(f"model {name[:80]} is not one member; a swap replaces one member")
        return model

    @contextlib.contextmanager
    def uploading(self, name: str) -> Iterator[int]:
        """Lets one checkpoint at a time arrive, for a member. Yields: the most bytes that it may have.

        Raises: Busy if another one arrives now; RequestError if the model is not one member.
        """
        model = self._one_member(name)
        if self._uploads:
            raise Busy("another checkpoint is being received; try again when it has arrived")
        self._uploads = True
        try:
            weights = model.artifact.model.manifest.member_weights
            sizes = [math.prod(w.of(model.member)) * dtype_of(w.dtype).itemsize for w in weights]
            yield _WIDER * sum(sizes) + _MORE_BYTES
        finally:
            self._uploads = False

    def begin_reload(self) -> asyncio.Task[None] | None:
        """Begins a reload on the event loop. Returns: its task; None if the server drains.

        The end of the server does not wait for it: until an artifact is loaded completely, nothing changes.
        """
        if self.draining:
            return None
        task = asyncio.ensure_future(self.reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)
        return task

    @property
    def loading(self) -> bool:
        """Whether a thread loads an artifact, also one whose reload was abandoned."""
        return self._threads.running

    async def reload(self) -> None:
        """Loads the artifacts again whose paths have another artifact now. A bad one changes nothing."""
        async with self._changing:
            for name, path in self.settings.artifacts.items():
                current = self.catalog.artifacts[name]
                try:
                    digest = await self._threads.run(partial(digest_of, path))
                    if digest == current.model.manifest.digest:
                        continue
                    artifact = await self._threads.run(partial(self._loaded, name, path))
                    catalog = self.catalog.replaced(artifact)
                except Exception as e:
                    self.metrics.reloaded("failed")
                    usual = isinstance(e, (WidepackError, OSError))
                    log.error("%s was not loaded again: %s", name, e, exc_info=None if usual else e)
                    continue
                self.catalog = catalog
                self._retired.append(current)
                self.metrics.reloaded("done")
                self.metrics.describe(artifact)
                log.info("%s is now version %s", name, artifact.version)

    def _loaded(self, name: str, path: str) -> ServedArtifact:
        return ready_artifact(name, loaded(self.settings, path), self.settings)

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """Starts to look at deadlines, and for new artifacts. It is called on the event loop."""
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        next_reload = time.monotonic() + self.settings.reload
        reload: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(TICK)
            try:
                self.batcher.check_waiting()
                self._show_gauges()
                self._close_retired()
                self._give_back()
            except Exception:  # deadlines and reloads must go on
                log.exception("the check of the waiting requests failed")
            if reload is not None and reload.done():
                reload, next_reload = None, time.monotonic() + self.settings.reload
            if self.settings.reload and reload is None and time.monotonic() >= next_reload:
                reload = self.begin_reload()  # a task: deadlines are checked meanwhile

    def _give_back(self) -> None:
        """Returns the memory of large bodies to the system, which the allocator keeps otherwise."""
        now = time.monotonic()
        if self.desk.used and now >= self._give_back_at and not self.receiving.bytes + self.sending.bytes:
            self.desk.used, self._give_back_at = False, now + GIVE_BACK_S
            threading.Thread(target=give_back, name="widepack-memory", daemon=True).start()

    def _close_retired(self) -> None:
        """Closes the models that a reload replaced, once no call of theirs waits or runs."""
        if self._retired and not self.batcher.uses([a.model for a in self._retired]):
            retired, self._retired = self._retired, []
            for artifact in retired:
                artifact.model.close()
            del artifact
            retired.clear()
            settle_again()

    def drain(self) -> None:
        """Says that it is not ready. Requests are still answered."""
        self.draining = True

    async def stop(self) -> None:
        """Answers what waits, and ends. A reload in progress is abandoned."""
        self.draining = True
        reloads = list(self._reloads)
        for task in reloads:
            task.cancel()
        await asyncio.gather(*reloads, return_exceptions=True)
        self.batcher.drain()
        limit = time.monotonic() + self.settings.timeout
        while not self.batcher.idle and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
            self._ticking = None
        self.batcher.close()
