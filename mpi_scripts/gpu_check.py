"""The parts of gpu_check.sh that are written in Python.

python mpi_scripts/gpu_check.py device            what is here; status 3 where there is no GPU, or none for torch
python mpi_scripts/gpu_check.py packages          what is missing to build and run; status 1 where something is
python mpi_scripts/gpu_check.py ops [--small]     every op on the GPU gives the bits that it gives on the CPU
python mpi_scripts/gpu_check.py train             two simulated ranks train on the GPU as they do on the CPU
python mpi_scripts/gpu_check.py copies            tensors come through host memory whole while the GPU is busy
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 3

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

try:
    import torch
    from torch import Tensor, nn
except ImportError:
    print("gpu check: there is no torch in this Python; nothing was checked")
    sys.exit(NO_GPU)


def check_device() -> int:
    """Say in one line what is here."""
    if torch.version.cuda is None:
        print(f"gpu check: torch {torch.__version__} has no CUDA; nothing was checked")
        return NO_GPU
    if not torch.cuda.is_available():
        print(
            f"gpu check: torch {torch.__version__} has CUDA {torch.version.cuda}, but no GPU is here; nothing checked"
        )
        return NO_GPU
    print(f"gpu check: {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    return 0


def check_packages(needed: Mapping[str, int]) -> int:
    """Name in one line the packages that are missing, older than the version needed, or that do not go together."""
    missing = []
    for name, least in needed.items():
        wanted = f"{name}>={least}" if least else name
        try:
            fits = int(metadata.version(name).split(".")[0]) >= least
            importlib.import_module(name)
        except metadata.PackageNotFoundError:
            fits = False
        except ImportError as error:  # numba refuses a numpy that it does not know
            fits, wanted = False, f"{wanted} that can be imported ({error})"
        if not fits:
            missing.append(wanted)
    if missing:
        print(f"gpu check: nothing can be built or run without {', '.join(missing)}")
    return int(bool(missing))


def shifted(tensor: Tensor, entries: int) -> Tensor:
    """The same entries, ``entries`` behind where memory is aligned."""
    memory = torch.empty(tensor.numel() + entries, dtype=tensor.dtype, device=tensor.device)
    memory[entries:] = tensor
    return memory[entries:]


def one_step(device: str, sizes: list[int], density: float, steps: int, *, tied: bool) -> list[Tensor]:
    """Everything the ops return and leave behind over some steps, as CPU tensors.

    With ``tied`` scores so many entries are as important as each other that there is no room for all of them.
    """
    from ringprune import ops

    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    offsets = [0]
    for n in sizes:
        offsets.append(offsets[-1] + n)

    def drawn(n: int, i: int) -> Tensor:
        normal = torch.randn(n, generator=generator)
        return shifted((normal.sign() if tied else normal).to(dtypes[i % 3]).to(device), i % 4)

    weights = [drawn(n, i) for i, n in enumerate(sizes)]
    residual, velocity = (torch.zeros(offsets[-1], device=device) for _ in range(2))
    hints = ops.Hints.none(len(sizes), torch.device(device))
    kept: list[Tensor] = []
    sent: ops.Sent | None = None
    for step in range(steps):
        grads = [drawn(n, i + 1) for i, n in enumerate(sizes)]
        found, nonfinite = ops.accumulate_select(
            grads,
            residual,
            velocity,
            weights,
            residual_out=residual,
            velocity_out=velocity,
            factors=[0.5] * len(sizes),
            momentum=[0.9] * len(sizes),
            nesterov=[i % 2 == 1 for i in range(len(sizes))],
            score="magnitude" if tied else "ratio",
            parameters=[0.05] * len(sizes),
            counts=[max(1, int(density * n)) if n else 0 for n in sizes],
            hints=hints,
            sent=sent,
        )
        scores = ops.importance(residual, weights, score="sum", parameters=[0.05] * len(sizes))
        again = ops.select(scores, offsets, [n // 3 for n in sizes])
        mine = found[found >= 0]
        read = ops.gather(residual, mine)
        rest = read / 256  # about what rounding to 8 bits drops
        sent = ops.Sent(mine, rest, masks=True)
        if step % 2:  # at once; else with the next pass
            sent, values = None, ops.take(residual, velocity, mine, offsets)
            ops.give_back(residual, mine, rest)
            kept.append(values)
        for levels in (4, 16):
            body = torch.empty(ops.book_body_bytes(read.numel(), levels), dtype=torch.uint8, device=device)
            dropped, sums = torch.empty_like(read), read.clone()
            ops.encode_books(read, dropped, body, levels=levels)
            ops.decode_books(body, sums, levels=levels, add=True)
            kept += [body, dropped, sums]
        outputs = [shifted(torch.empty_like(weight), i % 4) for i, weight in enumerate(weights)]
        ops.put(outputs, mine, read)
        kept += [found, nonfinite, scores, again, read, ops.square_sum(grads), ops.count_nonfinite(grads), *outputs]
    print(f"  {device}: {hints.counts()}")
    return [tensor.cpu() for tensor in [*kept, residual, velocity]]


def check_ops(device: str, small: bool) -> int:
    """Compare CPU and GPU over some steps."""
    from ringprune import ops

    if device == "cuda" and ops.backend() != "native+cuda":
        print(f"gpu check: the ops run as {ops.backend()!r}; native+cuda is needed")
        return 1
    # So many small ones that what is told of them does not fit into the arguments of one launch.
    few, many = [5, 0, 513, 40_000, 601, 602, 603, 604, *[1, 2, 3] * 67], [3_000_001, 5, 0, 513, 16_384, 1_000_000]
    sizes = few if small else [*many, *range(60, 460)]
    for density, tied in product((0.01,) if small else (0.001, 0.01, 0.1), (False, True)):
        what = f"density {density}{', tied' if tied else ''}"
        here, there = (one_step(to, sizes, density, steps=2 if small else 4, tied=tied) for to in ("cpu", device))
        for i, (left, right) in enumerate(zip(here, there, strict=True)):
            if not torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)):
                print(f"gpu check: {what}: result {i} differs in {int((left != right).sum())} entries")
                return 1
        print(f"  {what}: {len(here)} tensors have the same bits")
    return 0


def train(
    device: str, loss_of: Callable[[nn.Module, int, int], Tensor], model: Callable[[], nn.Module]
) -> list[Tensor]:
    """Weights after training on two simulated ranks, then the losses of rank 0, as CPU tensors."""
    import ringprune as rp

    def rank(comm: rp.comm.simulated.SimulatedCommunicator) -> list[Tensor]:
        copy = model().to(device)
        # a power of two: that product is exact, so that a fused multiply-add changes no bit
        inner = torch.optim.SGD(copy.parameters(), lr=0.125, momentum=0.5)
        policy = rp.IWP(density=0.05)
        optimizer = rp.DistributedOptimizer(inner, named_parameters=copy.named_parameters(), policy=policy, comm=comm)
        losses = []
        for step in range(30):
            optimizer.zero_grad()
            loss = loss_of(copy, comm.rank, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        return [*(param.detach().cpu() for param in copy.parameters()), torch.stack(losses)]

    return rp.simulate(2, rank)[0]


class Targets(nn.Module):
    """Weights that are drawn to targets entry by entry: no sum over entries, so the bits are the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(300, 200, generator=generator))
        self.bias = nn.Parameter(torch.randn(200, generator=generator))


def distance(model: nn.Module, rank: int, step: int) -> Tensor:
    """How far the weights are from the rank's targets."""
    generator = torch.Generator().manual_seed(rank)
    terms = []
    for param in model.parameters():
        target = torch.randn(param.shape, generator=generator).to(param.device)
        terms.append((param - target).square().sum() * 0.25)
    return sum(terms[1:], terms[0])


def classifier() -> nn.Module:
    """A small network, the same for every rank."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def cross_entropy(model: nn.Module, rank: int, step: int) -> Tensor:
    """Of the rank's batch; the class is the largest of the first ten features."""
    generator = torch.Generator().manual_seed(1_000 * rank + step)
    x = torch.randn(128, 64, generator=generator).to(next(model.parameters()).device)
    return nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))


def check_train(device: str) -> int:
    """Train two models; bits where the arithmetic allows, a falling loss where not."""
    here, there = (train(to, distance, Targets)[:-1] for to in ("cpu", device))
    same = all(torch.equal(left, right) for left, right in zip(here, there, strict=True))
    print(f"  weights after 30 steps, two ranks, CPU and {device}: {'the same bits' if same else 'DIFFERENT'}")
    losses = train(device, cross_entropy, classifier)[-1]
    first, last = float(losses[:5].mean()), float(losses[-5:].mean())
    falls = last < 0.9 * first
    print(f"  loss of a classifier on {device}: {first:.3f} -> {last:.3f}{'' if falls else ', which is NO FALL'}")
    return 0 if same and falls else 1


def check_copies() -> int:
    """Send tensors through pinned memory, as for MPI, while work is queued before and behind every copy."""
    from ringprune.comm.staging import CudaCopies

    copies, wrong, cycles = CudaCopies(), 0, 2_000_000
    for i, n in enumerate([1, 1_000, 4_000_001] * 10):
        torch.cuda._sleep(cycles)
        tensor = torch.full((n,), float(i), device="cuda") + 1
        copy = copies.to_host(tensor)
        del tensor
        other = torch.full((n,), -1.0, device="cuda")  # gets the tensor's memory, if that was given back too early
        while not copy.ready():
            pass
        wrong += int((copy.tensor != i + 1).sum()) + int((other != -1).sum())
        into = torch.zeros(n, device="cuda")
        torch.cuda._sleep(cycles)
        before = into + 1
        copies.to_device(copy.tensor.mul_(2), into)
        wrong += int((before != 1).sum()) + int((into + 1 != 2 * i + 3).sum())
    print(f"  30 tensors through pinned memory: {wrong} entries wrong")
    return int(wrong > 0)


def main() -> int:
    """Run one part."""
    parser = argparse.ArgumentParser(description="Parts of gpu_check.sh.")
    parser.add_argument("part", choices=["device", "packages", "ops", "train", "copies"])
    parser.add_argument("--small", action="store_true", help="little work, for compute-sanitizer")
    parser.add_argument("--device", default="cuda", help="what is compared with the CPU (cpu: a test of this file)")
    arguments = parser.parse_args()
    if arguments.part == "device":
        return check_device()
    if arguments.part == "packages":
        return check_packages({"setuptools": 77, "numpy": 0, "numba": 0})
    if arguments.part == "copies":
        return check_copies()
    return check_ops(arguments.device, arguments.small) if arguments.part == "ops" else check_train(arguments.device)


if __name__ == "__main__":
    sys.exit(main())
