"""Judge a Subject: train it on gloo ranks and in one process, and compare what they learn.

The reference computes in float64 if the module can. To measure what rounding alone changes, the module also trains in
one process in its own dtype, three times, each time from weights with other last bits.
"""

import dataclasses
import hashlib
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from titan_hydra.core.job.config import to_dict
from titan_hydra.core.job.config.fault import divisors, fault_at
from titan_hydra.core.models.init import clean_name
from titan_hydra.core.parallel.mesh import local_part
from titan_hydra.experiments.compose.compose import compose_job

from .judge import MULTIPLE, Differences, differ, widen
from .processes import spawn_ranks
from .reference import Trace
from .subject import Subject, load_subject
from .sums import reductions

# Differences that pass on any machine. A larger one is judged by the measured effect of rounding.
FLOOR = {"loss": 1e-5, "norm": 1e-5, "gradients": 1e-5, "weights": 1e-4}
# One run for each seed measures rounding. The seed changes the last bits of the weights; None leaves them unchanged.
SEEDS = (None, 1, 2)
SAVED = 1  # the step after which the resumed run starts


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the verdict. `passed` is None if the check could not be made; `where` then has the reason."""

    name: str
    value: str
    allowed: str
    where: str
    passed: bool | None


@dataclasses.dataclass(frozen=True)
class ModuleVerdict:
    """What `verify_module` has found."""

    module: str
    mesh: dict[str, int]
    reference: str
    checks: list[Check]
    # of each parameter's gradient: the difference, and the difference that is allowed
    gradients: dict[str, tuple[float, float]]

    @property
    def passed(self) -> bool:
        """Whether no check has failed."""
        return all(check.passed is not False for check in self.checks)


class Training:
    """A subject in training: on a rank of a mesh or, without a mesh, in one process."""

    def __init__(
        self,
        subject: Subject,
        mesh: DeviceMesh | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ):
        """Build the model from a fixed seed, with the mesh if one is given. `seed` moves the last bits of the weights
        at random, to measure what rounding alone changes.
        """
        torch.manual_seed(0)
        self.subject, self.mesh, self.dtype = subject, mesh, dtype
        model = subject.model().train()
        if seed is not None:
            _move_last_bits(model, seed)
        if mesh is not None:
            model = subject.parallelize(model, mesh)
        if dtype is not None:
            _convert(model, dtype)
        self.model = model
        make = subject.optimizer or (lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        self.optimizer = make(self.model)

    def step(self, number: int) -> tuple[float, float | str]:
        """Compute the gradients of a step, without an update. Returns this rank's loss, and the gradient norm or the
        reason why there is none.
        """
        subject = self.subject
        samples = subject.batch(number)
        if self.mesh is not None and subject.split:
            part = 0
            for name in subject.split:
                part = part * subject.mesh[name] + self.mesh.get_local_rank(name)
            samples = {key: value.chunk(subject.parts)[part] for key, value in samples.items()}
        total, parts = 0.0, subject.accumulation if self.mesh is not None else 1
        for index in range(parts):
            some = {key: self.as_dtype(value.chunk(parts)[index]) for key, value in samples.items()}
            loss = subject.loss(self.model, some, self.mesh)
            if subject.losses == "mean":
                loss = loss / parts
            loss.backward()
            total += _read(loss)
        return total, self.norm()

    def as_dtype(self, value: Tensor) -> Tensor:
        """Return a tensor of the batch; real numbers are cast to the dtype of the reference."""
        return value.to(self.dtype) if self.dtype is not None and value.is_floating_point() else value

    def norm(self) -> float | str:
        """Return the gradient's norm, computed by the subject or by torch, or the reason why there is none."""
        norm_of_subject = self.subject.norm
        try:
            if norm_of_subject is not None and self.mesh is not None:
                return _read(norm_of_subject(self.model, self.mesh))
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            return _read(torch.nn.utils.get_total_norm(gradients))
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:80]}"

    def update(self) -> None:
        """Apply the optimizer's step, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self, value: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        """Apply `value` to each parameter. Returns the results as whole tensors by name, with zeros instead of None. A
        collective.
        """
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        tensors = {}
        for name, parameter in model.named_parameters():
            tensor = value(parameter)
            tensor = torch.zeros_like(parameter) if tensor is None else tensor
            tensors[clean_name(name)] = self.whole(clean_name(name), tensor.detach())
        return tensors

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter, or its gradient, as a whole tensor in memory of its own."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        elif self.mesh is not None and self.subject.whole is not None:
            tensor = self.subject.whole(name, tensor, self.mesh)
        return tensor.clone()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a copy of the state dicts of the module and the optimizer."""
        return _copied(self.model.state_dict()), _copied(self.optimizer.state_dict())

    def load(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Load a copy that `state` has returned."""
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])


def verify_module(address: str, steps: int) -> ModuleVerdict:
    """Train the Subject at `address` for some steps on its ranks and in one process, and judge the differences. Raises
    ConfigError for a subject that cannot be run.
    """
    subject = load_subject(address)
    rows, parts = len(next(iter(subject.batch(1).values()))), subject.parts * subject.accumulation
    if rows % parts:
        reason = (
            f"{rows} samples cannot be split evenly over {subject.parts} ranks in {subject.accumulation} microbatches"
        )
        raise fault_at(subject, "accumulation", reason, *tuple(divisors(rows // subject.parts))).error
    config = to_dict(compose_job("precision=fp32"))
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(address, steps, config)]
        spawn_ranks(1, _train_reference, folder, jobs)
        spawn_ranks(subject.ranks, _train_layout, folder, jobs)
        result = json.loads(Path(folder, "found.json").read_text())
    checks = [Check(**check) for check in result["checks"]]
    return ModuleVerdict(address, subject.mesh, result["reference"], checks, result["gradients"])


def _train_reference(device: torch.device, folder: str, jobs: list[tuple[str, int, dict]]) -> None:
    """Save the reference's trace, and the differences that rounding alone makes when the module trains in one process."""
    (address, steps, _), *_ = jobs
    subject, kind = load_subject(address), "float64"
    try:
        exact = _train_alone(subject, steps, torch.float64)
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # a kernel does not support float64, or the module fixes a dtype
        exact, kind = (
            _train_alone(subject, steps, None),
            f"its own dtype, as float64 fails: {str(error).splitlines()[0]}",
        )
    spread: Differences = {}
    single: set[str] = set()
    for seed in SEEDS:
        draw = _train_alone(subject, steps, None, seed)
        spread = widen(spread, differ(draw, exact, draw=True))
        single |= {name for name, gradient in draw.gradients.items() if _looks_rounded(gradient)}
    torch.save((vars(exact), spread, single, kind), f"{folder}/reference.pt")


def _trace_of_start(training: Training) -> Trace:
    """Return a trace of no step, which has the initial weights."""
    start = training.tensors(lambda parameter: parameter)
    return Trace(losses=[], norms=[], gradients={}, start=start, weights={}, loads=[], biases={})


def _train_alone(subject: Subject, steps: int, dtype: torch.dtype | None, seed: int | None = None) -> Trace:
    """Train a subject in one process, and return its losses, norms, first gradients and weights."""
    training = Training(subject, dtype=dtype, seed=seed)
    trace = _trace_of_start(training)
    for step in range(1, steps + 1):
        loss, norm = training.step(step)
        trace.losses.append(loss)
        trace.norms.append(float(norm))
        if step == 1:
            trace.gradients = training.tensors(lambda parameter: parameter.grad)
        training.update()
    trace.weights = training.tensors(lambda parameter: parameter)
    return trace


def _train_layout(device: torch.device, folder: str, jobs: list[tuple[str, int, dict]]) -> None:
    """Train a subject on the ranks, and write what differs from the reference."""
    (address, steps, _), *_ = jobs
    subject = load_subject(address)
    fields, spread, single, kind = torch.load(f"{folder}/reference.pt")
    reference = Trace(**fields)
    mesh = init_device_mesh("cpu", tuple(subject.mesh.values()), mesh_dim_names=tuple(subject.mesh))
    training = Training(subject, mesh)
    trace = _trace_of_start(training)
    checks = [_names(trace.start, reference.start)]
    norms: list[float | str] = []
    if checks[0].passed:
        state, dtypes = None, set[str]()
        for step in range(1, steps + 1):
            with reductions() as (result, _):
                loss, norm = training.step(step)
            dtypes |= {str(dtype).removeprefix("torch.") for dtype in result}
            trace.losses.append(_joined(loss, mesh, subject, reference.losses[step - 1]))
            norms.append(norm)
            if step == 1:
                trace.gradients = training.tensors(lambda parameter: parameter.grad)
            training.update()
            state = training.state() if step == SAVED else state
        trace.norms = [float(norm) if isinstance(norm, float) else math.nan for norm in norms]
        trace.weights = training.tensors(lambda parameter: parameter)
        worst = _of_all_ranks(differ(trace, reference))
        checks += _columns(worst, spread, norms)
        checks += [_start(trace, reference), _copies(trace.weights), _dtypes(dtypes, subject, trace, single)]
        checks.append(_resume(subject, mesh, state, training, steps))
    if dist.get_rank() == 0:
        gradients = (
            {name: (value, _allowed("gradients", name, spread)) for name, value in worst["gradients"].items()}
            if norms
            else {}
        )
        result = {"reference": kind, "checks": [vars(check) for check in checks], "gradients": gradients}
        Path(folder, "found.json").write_text(json.dumps(result))


def _names(layout: dict[str, Tensor], reference: dict[str, Tensor]) -> Check:
    """Compare names and shapes of the whole parameters."""
    shapes = [{(name, tuple(value.shape)) for name, value in tensors.items()} for tensors in (layout, reference)]
    wrong = sorted({name for name, _ in shapes[0] ^ shapes[1]})
    where = f"missing, added or of another shape: {', '.join(wrong[:3])}" if wrong else ""
    return Check("parameters", str(len(layout)), str(len(reference)), where, not wrong)


def _columns(worst: Differences, spread: Differences, norms: list[float | str]) -> list[Check]:
    """Return the checks of loss, norm, gradients and weights, each with the entry that is farthest beyond its bound."""
    checks = []
    for column, differences in worst.items():
        name = max(differences, key=lambda name: differences[name] / _allowed(column, name, spread))
        value, allowed = differences[name], _allowed(column, name, spread)
        where = name if column in ("gradients", "weights") else ""
        unknown = next((norm for norm in norms if isinstance(norm, str)), None) if column == "norm" else None
        if unknown is not None:
            checks.append(
                Check(column, "", "", f"give Subject.norm, as torch.nn.utils.get_total_norm raises {unknown}", None)
            )
        else:
            checks.append(Check(column, f"{value:.1e}", f"{allowed:.1e}", where, value <= allowed))
    return checks


def _start(trace: Trace, reference: Trace) -> Check:
    """Count the parameters whose initial bits differ from those of the reference."""
    other = [
        name for name, value in reference.start.items() if not torch.equal(trace.start[name].to(value.dtype), value)
    ]
    return Check("start", str(len(other)), "0", ", ".join(other[:3]), not other)


def _copies(weights: dict[str, Tensor]) -> Check:
    """Count the parameters that differ between ranks after the last step. A collective."""
    digests = {
        name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in weights.items()
    }
    apart = [name for name in digests if len({other[name] for other in _gathered(digests)}) > 1]
    return Check("copies", str(len(apart)), "0", ", ".join(apart[:3]), not apart)


def _dtypes(dtypes: set[str], subject: Subject, trace: Trace, single: set[str]) -> Check:
    """Check that FSDP2 reduces in `reduce_dtype`, and that no gradient is rounded to bfloat16. `single` names the
    gradients that look rounded in one process too; they are not checked.
    """
    coarse = [name for name, value in trace.gradients.items() if name not in single and _looks_rounded(value)]
    right = dtypes <= {subject.reduce_dtype}
    where = f"summed in bfloat16: {', '.join(coarse[:3])}" if coarse else "" if dtypes else "no reduction by FSDP2"
    return Check("sums", " and ".join(sorted(dtypes)), subject.reduce_dtype, where, right and not coarse)


def _resume(subject: Subject, mesh: DeviceMesh, state: Any, training: Training, steps: int) -> Check:
    """Train again from the state that was saved, and compare this rank's weights bit for bit. A collective."""
    again = Training(subject, mesh)
    try:
        again.load(state)
    except Exception as error:
        return Check("resume", "", "same bits", f"{type(error).__name__}: {str(error).splitlines()[0]}", False)
    for step in range(SAVED + 1, steps + 1):
        again.step(step)
        again.update()
    pairs = zip(training.model.named_parameters(), again.model.parameters(), strict=True)
    other = [name for (name, first), second in pairs if not torch.equal(local_part(first), local_part(second))]
    other = sorted({name for names in _gathered(other) for name in names})
    return Check(
        "resume", f"{len(other)} differ" if other else "same bits", "same bits", ", ".join(other[:3]), not other
    )


def _joined(loss: float, mesh: DeviceMesh, subject: Subject, reference: float) -> float:
    """Return the loss of the whole batch, computed from the losses of all ranks. Where ranks with the same samples
    disagree, the loss that is farther from the reference counts. A collective.
    """
    by_part: dict[tuple[int, ...], list[float]] = {}
    for part, value in _gathered((tuple(mesh.get_local_rank(name) for name in subject.split), loss)):
        by_part.setdefault(part, []).append(value)
    divisor = len(by_part) if subject.losses == "mean" else 1
    ends = [sum(choose(values) for values in by_part.values()) / divisor for choose in (min, max)]
    return max(ends, key=lambda value: abs(value - reference) if math.isfinite(value) else math.inf)


def _of_all_ranks(of_this_rank: Differences) -> Differences:
    """Return the largest difference of each entry on any rank. A collective."""
    worst: Differences = {}
    for of_rank in _gathered(of_this_rank):
        worst = widen(worst, of_rank)
    return worst


def _allowed(column: str, name: str, spread: Differences) -> float:
    return max(FLOOR[column], MULTIPLE[column] * spread[column][name])


def _gathered(of_this_rank: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, of_this_rank)
    return everyone


def _move_last_bits(model: nn.Module, seed: int) -> None:
    """Move every weight to the next number of its dtype above or below it, chosen at random by `seed`."""
    dice = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        value = parameter.data
        toward = torch.where(torch.rand(value.shape, generator=dice) < 0.5, math.inf, -math.inf).to(value.dtype)
        parameter.data = value.nextafter(toward)


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert real tensors of a model to `dtype`, and complex tensors to the complex dtype of this precision.
    `Module.to` would drop imaginary parts.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data = tensor.data.to(dtype.to_complex() if tensor.is_complex() else dtype)


def _looks_rounded(gradient: Tensor) -> bool:
    """Whether a float32 tensor has only values that bfloat16 has too. False if all values are zero, which proves
    nothing.
    """
    return (
        gradient.dtype == torch.float32 and bool(gradient.any()) and torch.equal(gradient, gradient.bfloat16().float())
    )


def _read(value: Tensor) -> float:
    value = value.detach()
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_copied(value) for value in state]
    return state.detach().clone() if isinstance(state, Tensor) else state
