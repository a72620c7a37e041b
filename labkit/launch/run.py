"""A training run as the notebook sees it: going on in the background, watched, stopped, read."""

import html
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError, PlanError, RankError, RankLost, RankTimeout, shorten_traceback
from labkit.launch.efficiency import Efficiency, efficiency, tokens_per_second
from labkit.launch.progress import Line, Progress, progress_text
from labkit.launch.record import Record
from labkit.measure import Alignment, Offsets, events, sample_offsets, trace
from labkit.plan import Plan
from labkit.spec import Fp8, Training
from labkit.trace import Fp8Record, Trace

if TYPE_CHECKING:
    from labkit.cluster import Call, Ranks

__all__ = ["Run"]

TRAIN = "labkit.rank.training:train"
# Events travel beside results: those of the last step may arrive a moment later.
LAST_EVENTS_S = 5.0
ASK_AGAIN_S = 1.0
# Ctrl-C first asks for the end of the step, which keeps the training state; a stuck step is then interrupted.
GRACE_S = 0.5
INTERRUPT_S = 60.0


class Run:
    """One `launch.train`: its losses so far, its trace, and how it ended.

    Attributes:
        plan: what runs.
        training: the options of the run.
        state: "running", "done", "stopped" or "failed".
        error: what ended a failed run; losses so far stay readable.
        recoveries: empty: this release does not recover by itself.
    """

    def __init__(self, ranks: "Ranks", plan: Plan, training: Training, devices: Sequence[str]) -> None:
        self.plan = plan
        self.training = training
        self.state = "running"
        self.error: BaseException | None = None
        self.recoveries: list[Any] = []
        self._ranks: Ranks | None = ranks
        self._record = Record(range(plan.world_size), first_step=0 if training.start == "fresh" else None)
        self._ended = threading.Event()
        self._ending = False
        self._interrupting = threading.Lock()
        self._cursor = 0
        self._unsubscribe: list[Callable[[], Any]] = []
        self._offsets: tuple[Offsets | None, Offsets | None] = (None, None)
        self._trace: Trace | None = None
        self._devices = devices
        self._fp8_library: str | None = None
        self._zero_s = time.monotonic()

    def _begin(self, ranks: "Ranks") -> None:
        """Listen, submit, and collect on a thread; raises what submitting raises."""
        self._offsets = (sample_offsets(ranks), None)
        self._unsubscribe = [
            ranks.subscribe("step", self._record.on_step),
            ranks.subscribe("events", self._record.on_events),
            ranks.subscribe("fp8", self._record.on_fp8),
        ]
        try:
            self._zero_s = time.monotonic()
            call = ranks.run(TRAIN, self.plan, self.training, block=False)
        except BaseException:
            self._silence()
            raise
        threading.Thread(target=self._collect, args=(ranks, call), name="labkit-run", daemon=True).start()

    def _collect(self, ranks: "Ranks", call: "Call") -> None:
        """Wait for the ranks, then settle the state; runs on the thread `labkit-run`."""
        state, error = "failed", None
        try:
            state = self._finish(call.result(timeout_s=None))
        except BaseException as raised:
            state, error = ("stopped", None) if self._was_asked_for(raised) else ("failed", self._placed(raised))
        finally:
            try:
                self._offsets = (self._offsets[0], sample_offsets(ranks))
                self._silence()
            finally:
                # Ranks end with the last reference to them, and an ended run needs none.
                self._ranks = None
                self.error, self.state = error, state
                self._ended.set()

    def _finish(self, results: Sequence[Any]) -> str:
        """Take what the ranks returned; "done", or "stopped" when steps are missing."""
        result = next(r for r in results if r is not None)
        self._record.finish(result["losses"], result["grad_norms"], result["step_s"])
        self._devices = [r["device"] for r in results if r is not None and "device" in r] or self._devices
        self._fp8_library = result.get("fp8_library")
        num_steps = len(result["losses"])
        if self.training.trace:
            self._record.wait_for_events(num_steps, LAST_EVENTS_S)
        if self.training.record_fp8:
            self._record.wait_for_fp8(num_steps, LAST_EVENTS_S)
        return "done" if num_steps >= self.training.num_steps else "stopped"

    def _placed(self, error: BaseException) -> BaseException:
        """The error, with the step under way where a rank was lost: the cluster does not know it."""
        if not isinstance(error, RankLost) or error.step is not None:
            return error
        step = self._record.step
        return RankLost(f"[step {step}] {error}", rank=error.rank, step=step, signal=error.signal, lost=error.lost)

    def _was_asked_for(self, error: BaseException) -> bool:
        """Whether ranks ended because somebody interrupted them, which is no failure of theirs."""
        if isinstance(error, RankLost):
            return False
        freed = isinstance(error, RankError) and all(failure.interrupted for failure in error.failures.values())
        return freed or (self._ending and isinstance(error, KeyboardInterrupt | RankError | RankTimeout))

    def _silence(self) -> None:
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []

    def wait(self, timeout_s: float | None = None) -> "Run":
        """Wait for the end; Ctrl-C ends only the wait.

        Raises:
            RankTimeout: it was still running after `timeout_s`.
            LabError: what the run failed with.
        """
        if not self._ended.wait(timeout_s):
            raise self._still_running(f"train ({timeout_s:g} s)", "Wait longer, or end it with run.stop().", timeout_s)
        if self.error is not None:
            raise self.error
        return self

    def stop(self, timeout_s: float = 60.0) -> "Run":
        """End after the current step, on every rank alike; the training state stays live. Again: nothing happens.

        Raises:
            RankTimeout: the step did not end in time, for example because a rank is missing.
        """
        self._ending = True
        deadline = time.monotonic() + timeout_s
        while (ranks := self._ranks) is not None:
            # Asked again because a rank that has not yet begun forgets earlier requests.
            ranks.tell("stop")
            left = deadline - time.monotonic()
            if not self._ended.wait(min(ASK_AGAIN_S, max(left, 0.0))) and left <= 0:
                advice = "Call ranks.interrupt() to free the ranks: it ends the run where it is."
                raise self._still_running("stop", advice, timeout_s)
        self._ended.wait()
        return self

    def poll(self) -> Progress:
        """The run now; never waits. Events are those since the last poll."""
        rows, self._cursor = self._record.rows(self._cursor)
        losses = self._record.losses()
        return Progress(
            step=len(losses),
            losses=tuple(losses),
            grad_norms=tuple(self._record.grad_norms()[: len(losses)]),
            events=tuple(events(rows, self._alignment(), zero_s=self._zero_s)),
            state=self.state,
        )

    def _still_running(self, action: str, advice: str, timeout_s: float | None) -> RankTimeout:
        step = self._record.step
        return RankTimeout(
            f"[step {step}] the run did not end within {timeout_s:g} s: {step} of {self.training.num_steps} steps "
            f"are finished. {advice}",
            missing=range(self.plan.world_size),
            action=action,
            step=step,
        )

    def _follow(self, *, progress: bool) -> "Run":
        """Wait with a progress line; Ctrl-C ends the run. For `train(block=True)`."""
        line = Line() if progress else None
        try:
            while not self._ended.wait(0.1):
                if line is not None:
                    line.update(self._progress_text())
        except KeyboardInterrupt as error:
            self._end_now()
            if line is not None:
                line.update(self._progress_text(), final=True)
            shorten_traceback(error)
            raise
        if line is not None:
            line.update(self._progress_text(), final=True)
        return self.wait()

    def _end_now(self) -> None:
        """Stop, softly then hard, on a thread of its own: a second Ctrl-C ends the wait, not the clean-up."""
        self._ending = True
        threading.Thread(target=self._stop_or_interrupt, name="labkit-run-end", daemon=True).start()
        self._ended.wait(INTERRUPT_S)

    def _stop_or_interrupt(self) -> None:
        with self._interrupting:
            try:
                self.stop(timeout_s=GRACE_S)
            except LabError:
                if (ranks := self._ranks) is not None:
                    ranks.interrupt(timeout_s=INTERRUPT_S)

    def _progress_text(self) -> str:
        step, loss, step_s = self._record.newest()
        return progress_text(
            step=step,
            num_steps=self.training.num_steps,
            loss=loss,
            tokens_per_s=tokens_per_second(self.plan.tokens_per_step, step_s),
            state=self.state,
        )

    def _alignment(self) -> Alignment:
        return Alignment(start=self._offsets[0], end=self._offsets[1])

    @property
    def losses(self) -> list[float]:
        """`losses[i]` is the global mean loss of step i of this run."""
        return self._record.losses()

    @property
    def grad_norms(self) -> list[float]:
        """`grad_norms[i]` is the global gradient norm of step i, before clipping."""
        return self._record.grad_norms()

    @property
    def step_s(self) -> list[float]:
        """`step_s[i]` is how long step i took on rank 0, in seconds."""
        return self._record.step_s()

    @property
    def num_dropped(self) -> int:
        """How many of the oldest events were dropped so that a long run fits in memory."""
        return self._record.num_dropped

    @property
    def trace(self) -> Trace:
        """What every rank did, on one clock; of a run that goes on: so far. The newest 200,000 events of a long run."""
        if self._trace is not None:
            return self._trace
        ended = self._ended.is_set()
        rows, _ = self._record.rows()
        built = trace(self.plan, rows, self._alignment(), pace=self.training.pace)
        if ended:
            self._trace = built
        return built

    @property
    def fp8(self) -> Fp8Record:
        """What casts to FP8 did, with `record_fp8=True`; of a run that goes on: so far. The newest 1,000 steps.

        Raises:
            PlanError: the run records nothing of the kind.
        """
        if not self.training.record_fp8:
            raise PlanError(
                f"record_fp8=False in this run of '{self.plan.layout}': casts to FP8 are recorded when asked for. "
                "Train with the token fp8 in the layout and record_fp8=True."
            )
        return Fp8Record.read(self.training.fp8 or Fp8(), self._record.fp8())

    @property
    def fp8_library(self) -> str | None:
        """What multiplied in FP8: "transformer_engine", or "torch" and why; None before the end, or without FP8."""
        return self._fp8_library

    @property
    def tokens_per_s(self) -> float | None:
        """Global tokens per second, without the first step; None before a step has finished."""
        return tokens_per_second(self.plan.tokens_per_step, self._record.step_s())

    @property
    def efficiency(self) -> Efficiency:
        """Model FLOPs utilisation with what it was measured against, or the reason why there is none."""
        return efficiency(self.plan, self.tokens_per_s, self._devices)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1; None where the hardware's peak is not known (`efficiency` says why)."""
        return self.efficiency.mfu

    def __repr__(self) -> str:
        step, loss, _ = self._record.newest()
        parts = [f"step {step}/{self.training.num_steps}"]
        if step:
            parts.append(f"loss {self._record.losses()[0]:.4f} → {loss:.4f}")
        if speed := self.tokens_per_s:
            parts.append(f"{speed:,.0f} tokens/s")
        if self.error is not None:
            parts.append(f"{type(self.error).__name__}: {str(self.error).splitlines()[0] if str(self.error) else ''}")
        return f"<Run {self.plan.layout}: {self.state}, {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"
