"""One training step over the logical replicas.

`grad` is called once for each logical replica and `update` once for each device; nothing else changes
a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from perdure.checkpoint.group_save import require_same
from perdure.checkpoint.journal import Journal, is_computing_traced, is_tracing, trace_part
from perdure.digests import leaf_digests
from perdure.distribute.arrays import namespace
from perdure.distribute.audit import Audit, AuditedStep, AuditOptions
from perdure.distribute.engine import FusedStep, Grad, Stream, Update, stack
from perdure.distribute.reduction import Agreement, reduction_of
from perdure.distribute.topology import Plan
from perdure.distribute.values import PerReplica
from perdure.errors import ArgumentError, NonFiniteError, StateError, TopologyError
from perdure.runtime.process_group import Processes, gather_values
from perdure.state import flatten, restore, snapshot
from perdure.store.drill_hook import drill_hook
from perdure.text import few

# How often `perdure doctor` computes each part of a step.
_TIMES = 2


class TrainStep:
    """`state, logs = train_step(state, batch)`; see Strategy.step.

    Attributes:
        journal: Gets the digests of batch and total of each step that it records.
        audit_options: What `set_audit` was given.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        grad: Grad,
        update: Update,
        journal: Journal | None = None,
        donate: bool | None = None,
        *,
        check_finite: bool = False,
    ) -> None:
        if not isinstance(journal, Journal | None):
            raise ArgumentError(
                f"journal: expected manager.journal, found a {type(journal).__name__}."
            )
        self.journal = journal
        self._given = donate
        self._donate: bool | None = bool(donate)
        self._plan = plan
        self._seed = seed
        self._grad = grad
        self._update = update
        self._run = plan.engine.runner()
        self._finite = _FiniteCheck(plan) if check_finite else None
        fused = (
            "check_finite=True reads every contribution between grad and update"
            if check_finite
            else plan.engine.fused_step(grad, update, plan.replicas, seed)
        )
        self._fused = None if isinstance(fused, str) else fused
        self._not_fused = fused if isinstance(fused, str) else ""
        self._checked = False
        # The flags are read before the other processes wait for values that will not come.
        self._agreement = Agreement(plan, self._finite and self._finite.check)
        plan.steps += 1
        self._number = plan.steps
        self._updates = 0
        self._is_tracing = is_tracing()
        self._by_verbs_because = ""
        hook = drill_hook()
        self._doctor = hook if hook is not None and hook.is_doctor else None
        self.set_audit(AuditOptions())

    def set_audit(self, options: AuditOptions) -> None:
        """Compute a contribution of some of the steps that follow a second time, and compare."""
        self.audit_options = options
        self._audit = Audit(self._plan, self._seed, options) if options.rate else None

    def donate_results(self, on: bool = True) -> None:
        """Let each step use the memory of the state that the step before it returned, or end that.

        The first state, and one that was changed or restored in between, stay as they are. If
        `strategy.step` was given `donate`, that holds.
        """
        if self._given is None:
            self._donate = None if on else False
            if self._fused is not None:
                self._fused.forget()

    def explain(self) -> str:
        """See Strategy.explain."""
        if self._fused is None:
            return f"Not fast: {self._not_fused}."
        if self._by_verbs_because:
            return f"Not fast: the step was {self._by_verbs_because}."
        return self._fused.explain() or "Not decided yet: the first call of the step decides."

    def __call__(self, state: Any, batch: PerReplica) -> tuple[Any, Any]:
        """Train on one global batch.

        Args:
            state: What `grad` and `update` take. PyTorch changes it in place.
            batch: The shares of the local replicas, with their step: `strategy.batch(dataset, step)`.

        Returns:
            The state after the step, and the logs that `update` returned.

        Raises:
            NonFiniteError: A contribution is not finite, under `check_finite`.
            SilentCorruptionError: An audited contribution was computed with other bits.
            StateError: Replicas contribute different structures, or, at the first step, the processes
                of the group have different states.
            TopologyError: The batch was not made by this strategy.
        """
        engine = self._plan.engine
        step = self._step_of(batch)
        if self._doctor is not None:
            functions = self._grad, self._update
            check = _StepCheck(self._plan, self._seed, functions, self._fused)
            self._doctor.checked_step(check.results(state, batch))
        if not self._checked and engine.processes.count > 1:
            _require_same_state(engine.processes, state)
        journal = self.journal if self.journal and self.journal.wants(step + 1) else None
        if journal is not None:
            journal.note(batch.values, engine.processes, sum(engine.devices_per_process))
        audit = self._audit and self._audit.audited_step(step)
        traced = self._is_tracing and is_computing_traced(step + 1)
        # In one fused program there are no contributions.
        self._by_verbs_because = (
            "audited, which compares the contributions of replicas"
            if audit
            else "traced, which reports each of its parts"
            if traced
            else ""
        )
        if self._fused and not self._by_verbs_because:

            def reference(whole: Any) -> list[tuple[Any, Any]]:
                results.extend(self._by_verbs(whole, batch, step))
                return results

            results: list[tuple[Any, Any]] = []
            result = self._fused(state, batch.values, step, self._donate, reference)
            if result is not None:
                return result
            if results:
                return self._as_one(results)
        return self._as_one(self._by_verbs(state, batch, step, audit, journal, traced))

    def _by_verbs(
        self,
        state: Any,
        batch: PerReplica,
        step: int,
        audit: AuditedStep | None = None,
        journal: Journal | None = None,
        traced: bool = False,
    ) -> list[tuple[Any, Any]]:
        """(state, logs) of each device, or of their one memory."""
        plan, engine = self._plan, self._plan.engine
        states = engine.place(state)
        total = self._total(states, batch, step, audit, traced)
        if self._finite is not None and engine.processes.count == 1:
            self._finite.check()
        if journal is not None:
            journal.note_total(total)
        if traced:
            trace_part("total", total)
        stream = Stream(self._seed, step, plan.replicas)
        # The total is on the first device.
        results = [engine.update(self._update, states[0], total, stream)]
        if traced:  # once, because all local devices compute the same
            trace_part("update", results[0][0])
        for number in range(1, len(states)):
            moved = engine.put(total, engine.devices[number])
            results.append(engine.update(self._update, states[number], moved, stream))
        self._updates += 1
        return results

    def _as_one(self, results: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        return self._plan.engine.replicate([result[0] for result in results]), results[0][1]

    def many(self, state: Any, batches: Iterable[PerReplica]) -> tuple[Any, Any]:
        """Train on several batches, one after the other, with the bits of the single steps.

        Args:
            state: The state before the first step.
            batches: At least one batch, as `__call__` takes it.

        Returns:
            The state after the last step, and the logs of all steps, stacked along a new first axis.
        """
        all_logs = []
        for batch in batches:
            state, logs = self(state, batch)
            all_logs.append(logs)
        if not all_logs:
            raise TopologyError("many: expected at least one batch, found none")
        return state, stack(self._plan.engine.trees, all_logs)

    def _total(
        self,
        states: list[Any],
        batch: PerReplica,
        step: int,
        audit: AuditedStep | None,
        traced: bool,
    ) -> Any:
        """The sum of the contributions of all replicas of the group."""
        plan, engine = self._plan, self._plan.engine
        reduction, first = reduction_of(plan), plan.first

        def compute(device: int, placed: Any, replica: int, share: Any) -> Any:
            share = engine.put(share, engine.devices[device])
            stream = Stream(self._seed, step, replica)
            if not traced:
                return engine.grad(self._grad, placed, share, stream)
            if replica == 0:
                trace_part("before", placed)
            trace_part("batch", share, replica)
            trace_part("key", {"key": engine.key(stream)}, replica)
            value = engine.grad(self._grad, placed, share, stream)
            trace_part("contribution", value, replica)
            return value

        def contribute(device: int, placed: Any) -> Iterator[tuple[int, Any]]:
            for replica in range(*plan.local[device]):
                value = compute(device, placed, replica, batch.values[replica - first])
                if audit:
                    audit.keep(replica, value)
                if self._finite is not None:
                    self._finite.note(step, replica, value)
                reduction.push(device, replica, value)
                yield replica, value
                del value  # not alive beside the next one

        # If an update failed in one process, its state is older than the state of the others.
        at = f"step {step} of training function {self._number}, which has made {self._updates} updates"
        try:
            self._run(contribute, states)
            if audit:
                audit.check(self._run, compute, states, batch.values)
            reduction.close()
        except Exception as error:
            if engine.processes.count > 1:
                self._agreement.fail(at, error)
            raise
        total = reduction.total(self._agreement, at)
        self._checked = True
        return total

    def _step_of(self, batch: PerReplica) -> int:
        if not isinstance(batch, PerReplica) or batch.step is None:
            raise TopologyError(
                "train_step: expected what strategy.batch(dataset, step) returns, which carries the "
                f"step; found {type(batch).__name__}"
            )
        if batch.replicas != self._plan.local_replicas:
            raise TopologyError(
                f"expected shares for the replicas {self._plan.local_replicas}, found "
                f"{batch.replicas}: the batch was made by another strategy"
            )
        return batch.step


class _FiniteCheck:
    """Finds the replica whose contributions are not finite, by flags that are read once in a step."""

    def __init__(self, plan: Plan) -> None:
        self._engine = plan.engine
        self._step = -1
        self._seen: dict[int, tuple[list[str], list[Any]]] = {}

    def note(self, step: int, replica: int, value: Any) -> None:
        if step != self._step:  # of an earlier one that failed before its check
            self._seen.clear()
        flags: list[Any] = []
        self._engine.trees.map(lambda leaf: flags.append(namespace(leaf).is_finite(leaf)), value)
        self._step, self._seen[replica] = step, (self._engine.trees.paths(value), flags)

    def check(self) -> None:
        """Raise `NonFiniteError` in all processes if a contribution is not finite. A collective."""
        seen, self._seen = self._seen, {}
        bad = [
            (replica, name)
            for replica in sorted(seen)
            for name, finite in zip(*seen[replica], strict=True)
            if not bool(finite)
        ]
        if bad := [one for row in gather_values(self._engine.processes, bad) for one in row]:
            lines = [f"{name} of logical replica {replica}" for replica, name in bad]
            raise NonFiniteError(
                f"step {self._step}: NaN or infinity in {few(lines, 10)}. The state has not changed. "
                f"strategy.batch(dataset, {self._step}).values holds the shares of this step, and "
                f"strategy.keys({self._step}) their keys"
            )


def _require_same_state(processes: Processes, state: Any) -> None:
    """Workers that begin with different states would end with different ones, unnoticed."""
    try:
        leaves = flatten(state)
    except StateError:
        leaves = {}  # a state that cannot be saved exactly can still be trained
    require_same(processes, leaves)


class _StepCheck:
    """`perdure doctor -- python train.py`: the first step computed several times, on every device.

    Only digests leave this class. The program is ended afterwards.
    """

    def __init__(
        self, plan: Plan, seed: int, functions: tuple[Grad, Update], fused: FusedStep | None
    ) -> None:
        self._plan = plan
        self._seed = seed
        self._grad, self._update = functions
        self._fused = fused
        self._results: list[dict[str, Any]] = []

    def results(self, state: Any, batch: PerReplica) -> list[dict[str, Any]]:
        """`{what, device, leaves}` of each result, or `{what, device, problem}`."""
        step = batch.step
        assert step is not None
        engine = self._plan.engine
        # Devices that share their memory compute with the same object: they count as one.
        states = engine.place(state)
        copies = list(zip(states, engine.devices, strict=False))
        total = self._total(copies, batch, step)
        self._add("the sum of the replicas", engine.devices[0], {"sum": total})
        try:
            self._updates(copies, total, step)
        except StateError as error:
            problem = f"it cannot be computed twice: {error}"
            self._results.append({"what": "update", "device": "", "problem": problem})
        self._fused_steps(state, batch, step)
        return self._results

    def _total(self, copies: list[tuple[Any, Any]], batch: PerReplica, step: int) -> Any:
        plan, engine = self._plan, self._plan.engine
        reduction = reduction_of(plan)
        for own, (first, stop) in enumerate(plan.local):
            # The device that has the replica comes first: its value is the one that is added.
            home = own % len(copies)
            order = [copies[home], *copies[:home], *copies[home + 1 :]]
            for replica in range(first, stop):
                share = batch.values[replica - plan.first]
                stream = Stream(self._seed, step, replica)
                value = None
                for number, (placed, device) in enumerate(order):
                    for _ in range(_TIMES if number == 0 else 1):
                        moved = engine.put(share, device)
                        result = engine.grad(self._grad, placed, moved, stream)
                        self._add(f"replica {replica}", device, {"contribution": result})
                        value = result if value is None else value
                        del result
                reduction.push(own, replica, value)
        return reduction.total(at=f"the check of step {step}")

    def _updates(self, copies: list[tuple[Any, Any]], total: Any, step: int) -> None:
        engine = self._plan.engine
        stream = Stream(self._seed, step, self._plan.replicas)
        # As they were, because an `update` of PyTorch changes its arguments.
        whole = snapshot(total)
        for placed, device in copies:
            before = snapshot(placed)
            for number in range(_TIMES):
                total = restore(total, whole)
                moved = engine.put(total, device)
                old = placed = placed if number == 0 else restore(placed, before)
                new, logs = engine.update(self._update, old, moved, stream)
                self._add("update", device, {"state": new, "logs": logs})

    def _fused_steps(self, state: Any, batch: PerReplica, step: int) -> None:
        engine = self._plan.engine
        for _ in range(_TIMES if self._fused is not None else 0):
            assert self._fused is not None
            result = self._fused(state, batch.values, step)
            if result is None:
                return
            new, logs = result
            for placed, device in zip(engine.place(new), engine.devices, strict=False):
                name = f"{device}, as one program"
                self._add("update", name, {"state": placed, "logs": logs})

    def _add(self, what: str, device: Any, value: dict[str, Any]) -> None:
        try:
            digests = leaf_digests(value)
        except StateError:  # logs may be anything
            value.pop("logs", None)
            digests = leaf_digests(value)
        leaves = {path: digest.hex for path, digest in digests.items()}
        self._results.append({"what": what, "device": str(device), "leaves": leaves})
