"""Defines `Fused`: N live members as one nn.Module that trains. `widepack.fuse` makes it.

Its parameters are the members' parameters, stacked to `[N, *shape]` under the member's own names. So
optimizers, `state_dict`, `.to`, hooks and gradient clipping work as for any module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._compile import _disable_dynamo

from ..checkpoints.eval_mode import has_own_mode
from ..errors import UsageError
from ..inference.input_values import each_if_tensor
from ..inference.output import build_answer
from ..inference.programs.failed_call import Run, unknown_row
from ..ir.torch_internals import in_forward_mode, in_transform, outside_transforms
from ..system.autocast import plain_modes
from .captures import capture_entry
from .channel_packing import pack, split_channels
from .check import check, settle
from .losses import member_losses
from .members import FusedMembers
from .own_modes import follow_own_mode
from .parts import StackedModule, refuse_apply, refuse_setting
from .programs import CPU, FusedEntry, Runner
from .recipe import FusedRecipe
from .same_members import refuse_gradients
from .unchanged import unchanged

if TYPE_CHECKING:
    from ..building.report import BuildReport


class Fused(FusedMembers):
    """N members in one module. Call it as you call a member; each output leaf is `[N, *the member's shape]`.

    - `fused(x)`: all members see x.
    - `fused.each(xs)`: member i sees `xs[i]`.
    - `fused(x, h=widepack.each(h))`: all members see x, and member i sees `h[i]`.

    In eval mode without gradients it runs the program that `widepack.load` would run. In train mode, under
    `torch.autocast`, or when gradients are computed, it runs a differentiable program; each member gets its
    own gradients. Each part has its own mode: `fused.norm.eval()` stops the update of one layer's statistics.

    A fused module is made by `widepack.fuse`. It has the members' parts and parameters as attributes, for
    example `fused.layers[0].weight`. `len(fused)` is N, and iteration gives copies of the members.

    Example:
        >>> fused = widepack.fuse(models, torch.randn(32, 16))
        >>> optimizer = widepack.optim.AdamW(fused.parameters(), lr=[1e-3, 3e-4, 1e-4])
        >>> fused(x).square().mean().backward()
        >>> optimizer.step()
    """

    __module__ = "widepack"  # pickles name the public place

    _compiled: dict[str, Any] | None = None
    if TYPE_CHECKING:  # what has the members' names is a part, a parameter or a buffer

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, recipe: FusedRecipe) -> None:
        super().__init__()
        self.__dict__.update(_recipe=recipe, _entries={}, _slots={}, _parts={}, _frozen=())

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused:
        """Returns a module with its own weights, over the same programs."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        other.mark_parameters()
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the programs, which are made again, caches, and options of `compile`."""
        return {**self.__dict__, "_entries": {}, "_slots": {}, "_parts": {}, "_compiled": None}

    def _get_name(self) -> str:
        return f"Fused{len(self)}{self._recipe.member_class}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fused:
        """Converts all weights, as `to` does. `to(memory_format=...)` is for weights of the members, which
        have a dim less; stacked weights that it does not fit keep their order.
        """

        def of_members(value: torch.Tensor) -> torch.Tensor:
            try:
                return fn(value)
            except RuntimeError as e:
                if "channels_last" not in str(e):
                    raise
                return torch.stack([fn(row) for row in value])

        super()._apply(of_members, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members. Each sees the same inputs, except those marked with `widepack.each`.

        In train mode it updates the buffers that members change (statistics), for each member its own.

        Args:
            *args: The inputs, as the member's forward takes them. A packed module takes `[B, N*C, ...]`, or
                `[B, C, ...]` for all members.
            **kwargs: The same, by name.

        Returns:
            The member's structure. Each leaf is `[N, *the member's shape]`, or a list of N tensors where the
            members' shapes differ. A packed module returns `[B, N*C, ...]`.

        Raises:
            InputError: The inputs do not fit. Nothing has run.
            CaptureError: The member cannot be captured in this mode (at the first call in a mode).
            LoweringError: No wide program of this mode can be made (at the first call in a mode).
            VerificationError: A new program does not answer as the members do.

        Example:
            >>> y = fused(x)  # x: [B, 16], y: [N, B, 3]
        """
        entry = self.current_entry()
        values, stacked = entry.binder.bind(args, kwargs)
        if not self._recipe.packed:
            return self._answer(entry, values, stacked)
        for k, leaf in enumerate(entry.binder.leaves):
            values[k], stacked[k] = split_channels(leaf.title, values[k], leaf.dims, stacked[k], len(self))
        output = self._answer(entry, values, stacked)
        return pytree.tree_map(lambda y: pack(y) if isinstance(y, torch.Tensor) else y, output)

    def each(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members, each on separate inputs: member i gets `[i]` of every input.

        Args:
            *args: The inputs, each `[N, ...]` or a list of N tensors.
            **kwargs: The same, by name.

        Returns:
            What a call returns. Hooks of the module run too.

        Raises:
            InputError: The inputs do not fit, for example because axis 0 is not N.

        Example:
            >>> y = fused.each(torch.stack([x0, x1, x2]))
        """
        return self(*map(each_if_tensor, args), **{k: each_if_tensor(v) for k, v in kwargs.items()})

    def losses(
        self,
        fn: Callable[..., torch.Tensor] | Sequence[Callable[..., torch.Tensor]],
        answers: Any,
        *targets: Any,
    ) -> torch.Tensor:
        """Returns each member's loss. The gradients of their sum are each member's own.

        Args:
            fn: Returns one number of a member's answer and its targets. It is called once for each member. A
                list has a function for each member.
            answers: What a call of this module has returned.
            *targets: What `fn` takes after the answer: the same for all members, except those marked with
                `widepack.each`.

        Returns:
            The losses, `[N]`.

        Raises:
            UsageError: The answers, the targets or the functions are not of N members, or a function returns
                more than one number.

        Example:
            >>> labels = torch.randint(0, 3, (16,))
            >>> losses = fused.losses(nn.functional.cross_entropy, fused(x), labels)
            >>> losses.sum().backward()
        """
        return member_losses(fn, answers, targets, len(self), packed=self._recipe.packed)

    def only(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of a dict's inputs that the modules use, as `WideModel.only` does.

        Args:
            inputs: The inputs by name: a dict, or another mapping.

        Returns:
            A new dict, in the order of `inputs`.

        Raises:
            InputError: `inputs` is not a mapping.

        Example:
            >>> y = fused(**fused.only(batch))
        """
        return self.current_entry().binder.only(inputs)

    def _answer(self, entry: FusedEntry, values: Sequence[torch.Tensor], stacked: Sequence[bool]) -> Any:
        sizes = entry.binder.check(values, stacked)
        weights = self.tensors_of(entry)
        differentiate = (
            torch.is_grad_enabled()
            and not entry.captured.frees_graph
            and any(t.requires_grad for t in (*weights.values(), *values))
        )
        runner = self._runner(entry, stacked, sizes, differentiate)
        if differentiate:
            weights = self.without_frozen_gradients(weights)
        buffers = [self.tensor_of(name) for _, _, name in entry.carried]
        inputs = [*values, *(b.clone() for b in buffers)]
        try:
            outputs = runner.run(weights, inputs)
        except (IndexError, RuntimeError) as e:
            self._refuse_unknown_rows(entry, weights, inputs, stacked, e)
            raise
        output = build_answer(outputs, runner.program.outputs, len(self), entry.result)
        with torch.no_grad():
            for buffer, (_, k, _) in zip(buffers, entry.carried):
                buffer.copy_(self.with_frozen_rows(outputs[k], buffer))
        return output

    @_disable_dynamo
    def _refuse_unknown_rows(
        self,
        entry: FusedEntry,
        weights: Mapping[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        stacked: Sequence[bool],
        error: Exception,
    ) -> None:
        """Raises an InputError if a call failed because a member looks up a row that a table does not have.

        Nothing is raised inside a transform of `torch.func`, which hides values.

        Args:
            entry: The programs of the call.
            weights: The weights by name.
            inputs: The inputs of the call, and the buffers that members change.
            stacked: For each input of the call whether it has a member axis. Buffers have one.
            error: What the call raised.
        """
        if in_transform():
            return
        (program,) = entry.programs
        per_member = [*stacked, *(True for _ in entry.carried)]

        def runs() -> Iterator[Run]:
            """Yields the program of each member with its weights and inputs."""
            for i in range(entry.count):
                own = [
                    weights[s.source][i] if entry.kinds[s.source] == "stacked" else weights[s.source]
                    for s in program.weights
                ]
                yield program, own, [x[i] if split else x for x, split in zip(inputs, per_member)]

        with torch.random.fork_rng(devices=[]):  # members that draw run once more
            refused = unknown_row("fused", runs())
        if refused is not None:
            raise refused from error

    def prepare(self) -> None:
        """Makes the program of the current mode now, instead of at the first call.

        Raises:
            CaptureError: The member cannot be captured.
            MemberMismatch: Members have other programs than member 0.
            VerificationError: The program does not answer as the members do.

        Example:
            >>> fused.eval().prepare()
        """
        entry = self.current_entry()
        self._runner(entry, [False] * entry.input_count, entry.sizes, False)

    # as torch.compiler.disable, which imports the compiler: programs are made outside of a graph
    @_disable_dynamo
    def _runner(
        self, entry: FusedEntry, stacked: Sequence[bool], sizes: Mapping[str, int], differentiate: bool
    ) -> Runner:
        """Returns what runs a call of these inputs. A new program is compared with the members first."""
        autocast = torch.is_autocast_enabled(entry.device.type)
        # transforms and autocast do not reach weights that are prepacked, nor widepack's own ops
        through = autocast or in_transform() or in_forward_mode()
        plain = differentiate or any(self._modes()) or through
        runner = entry.runner(stacked, sizes, plain, through)
        if runner.checked:
            return runner
        recipe = self._recipe
        if runner.gradients:
            trained = {n for n, p in self.named_parameters(remove_duplicate=False) if p.requires_grad}
            refuse_gradients(recipe.skeletons[0].module, trained)
        if recipe.validate:
            with self._apart():
                check(self, entry, runner)
        runner.checked = True
        return runner

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Keeps the modes of a call away from a program that is made, and leaves what the members' code
        reaches outside of them (globals, closures of classes) as it is.
        """
        own = list(dict.fromkeys(s.module for s in self._recipe.skeletons))
        with torch.inference_mode(False), plain_modes(), outside_transforms(), unchanged(own):
            yield

    @_disable_dynamo
    def current_entry(self) -> FusedEntry:
        """Returns the programs of the current mode, dtypes and device. The first call captures them."""
        recipe = self._recipe
        tensors = [self.tensor_of(w.name) for w in recipe.weights]
        leaves = recipe.call.leaves
        devices = {v.device for v in tensors} or {leaves[0].example.device if leaves else CPU}
        if len(devices) > 1:
            raise UsageError(
                f"the weights of a fused module lie on {', '.join(map(str, devices))}; "
                "move all of them to one device with .to()"
            )
        (device,) = devices
        modes = self._modes()
        key = (modes, tuple(v.dtype for v in tensors), device)
        if key in self._entries and not self._entries[key].reads_as_captured(self.tensor_of):
            del self._entries[key]
        if key not in self._entries:
            mode = "train" if any(modes) else "eval"
            # a program is captured with gradients, because it may train later
            with self._apart(), torch.enable_grad():
                entry = capture_entry(recipe, self.sample(), lambda i: self.member(i, CPU), device, mode)
                settle(self, entry)
                entry.reads_as_captured(self.tensor_of)
                if self._compiled is not None:
                    entry.compile(self._compiled)
                self._entries[key] = entry
        return self._entries[key]

    def compile(
        self,
        *,
        dynamic: bool | None = False,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        fullgraph: bool = False,
    ) -> None:
        """Compiles the programs that train with `torch.compile`, in the place of `nn.Module.compile`.

        Each program is compiled, forward and backward, at its first call, and its outputs and gradients are
        compared with those of the program without compilation. If they differ, it runs without, and a warning
        says so. Up to eight batch sizes of a program have a compiled form (`torch._dynamo.config`). Second
        derivatives are refused by torch. In eval mode without gradients the module runs as before. A copy of
        the module is compiled too; a pickle of it is not.

        Args:
            dynamic: As in `torch.compile`. Default: False, one compiled form for each batch size.
            backend: The compiler, as in `torch.compile`.
            mode: As in `torch.compile`.
            options: As in `torch.compile`.
            fullgraph: As in `torch.compile`.

        Raises:
            RuntimeError: torch refuses the options.

        Example:
            >>> fused = widepack.fuse(models, x).train()
            >>> fused.compile()
            >>> fused(x).square().mean().backward()
        """
        chosen: dict[str, Any] = {"dynamic": dynamic, "backend": backend, "mode": mode, "options": options}
        chosen["fullgraph"] = fullgraph
        torch.compile(lambda: None, **chosen)  # refuses invalid options
        for entry in self._entries.values():
            entry.compile(chosen)
        self.__dict__["_compiled"] = chosen

    @property
    def draws(self) -> bool:
        """Whether members draw random numbers in the current mode.

        Example:
            >>> fused.eval().draws
            False
        """
        return self.current_entry().random

    def train(self, mode: bool = True) -> Fused:
        """Sets train or eval mode for all parts, as the members' own `train` does, and returns the module.

        Args:
            mode: Whether it is train mode. Default: True.

        Returns:
            The module.

        Raises:
            UsageError: The members' own `train()` or `eval()` changes their weights or other values, and so
                their answers.

        Example:
            >>> fused = fused.train()
        """
        self.forget()
        before = [(part, part.training) for part in self.modules()]
        for part in self.modules():
            part.training = mode
            if not isinstance(part, (Fused, StackedModule)):  # the user has added it
                part.train(mode)
        if not has_own_mode(self._recipe.skeletons[0].module):
            return self
        try:
            with self._apart(), torch.inference_mode(False), torch.no_grad():
                follow_own_mode(self, mode)
        except UsageError:
            for part, training in before:
                part.training = training
            raise
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            refuse_setting(self._recipe.settings, name)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds a module, which the program does not call. Refuses the name of one that it calls."""
        refuse_setting(self._recipe.settings, name)
        super().add_module(name, module)

    def apply(self, fn: Any) -> Any:
        """Refuses `apply`, whose function would ask for classes of torch, which few parts have."""
        refuse_apply()

    def forget(self) -> None:
        """Drops what was computed from weights in eval mode, so that the next call computes it again.

        Call it only after a write that torch does not count, through `.data`.

        Example:
            >>> fused.layer.weight.data.zero_()[0, 0, 0].item()
            0.0
            >>> fused.forget()
        """
        for entry in self._entries.values():
            entry.forget()

    def save(
        self,
        path: str | PathLike[str],
        *,
        names: Sequence[str] | None = None,
        force: bool = False,
        pt2: bool = True,
    ) -> BuildReport:
        """Writes the members, as they are now, as an artifact that `widepack.load` opens.

        The artifact runs in eval mode, and is verified as every build. If dropout is on, it is on in the
        artifact too, as `build(..., dropout="on")` makes it. N passes of one model store its weights once.

        Args:
            path: The folder to write.
            names: The members' names. Default: `"0"`, `"1"`, ...
            force: Whether to replace an artifact at this path. Default: False.
            pt2: Whether to store the captured program as a `.pt2` file too. Default: True.

        Returns:
            The report of the build.

        Raises:
            WidepackError: What `widepack.build` raises.

        Example:
            >>> fused.save("ens.wide")
            >>> ens = widepack.load("ens.wide")
        """
        from .save import save  # imports all that a build needs

        return save(self, self._recipe, path, names, force, pt2)
