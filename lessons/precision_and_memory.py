"""Mixed precision, recomputation and offload by hand. The text is in precision_and_memory.md.

weft lesson precision_and_memory
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from weft.cli.lessons.output import say, show, t

LAYERS, DIM, BATCH, STEPS, LR = 8, 64, 256, 200, 2.0**-10


def add_updates(dtype: torch.dtype, master: bool) -> float:
    """A weight of 1 after STEPS updates of LR, kept in this dtype, or computed from a copy in fp32."""
    weight, copy = torch.ones((), dtype=dtype), torch.ones(())
    for _ in range(STEPS):
        if master:
            copy += LR
            weight = copy.to(dtype)
        else:
            weight += LR  # rounded to the nearest number of the dtype: 1 + 1/1024 is 1 in bf16
    return weight.item()


def lost_in_fp16(gradients: Tensor, scale: float) -> float:
    """The share of gradients that fp16 rounds to 0 when the loss is multiplied by the scale."""
    return float(((gradients * scale).half() == 0).float().mean())


class LossScale:
    """Halved when a gradient overflows, and the step is skipped; doubled after 4 good steps in a row."""

    def __init__(self, scale: float) -> None:
        self.scale, self.good = scale, 0

    def update(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good == 4:
            self.scale, self.good = self.scale * 2, 0


class Counted:
    """Counts the bytes that autograd keeps, once a storage, and moves them to another place if `offload`."""

    def __init__(self, model: nn.Module, offload: bool = False) -> None:
        self.bytes, self.moved, self.offload = 0, 0, offload
        self.seen = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(self, x: Tensor) -> Tensor:
        new = x.untyped_storage().data_ptr() not in self.seen
        if new and not self.offload:
            self.seen.add(x.untyped_storage().data_ptr())
            self.bytes += x.untyped_storage().nbytes()
        elif new:
            self.moved += x.numel() * x.element_size()
            return x.clone()  # on a GPU: x.to("cpu", non_blocking=True), so the device's copy is freed
        return x

    def bring(self, x: Tensor) -> Tensor:
        return x  # on a GPU: x.to("cuda", non_blocking=True), before the backward pass needs it


def run(recompute: bool, offload: bool) -> tuple[Counted, int, Tensor]:
    """What is kept, the operations, and the gradient of the first weight."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.GELU()) for _ in range(LAYERS)))
    x = torch.randn(BATCH, DIM, requires_grad=True)
    counted, y = Counted(layers, offload), x
    with FlopCounterMode(display=False) as flops:
        with torch.autograd.graph.saved_tensors_hooks(counted.keep, counted.bring):
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=False) if recompute else layer(y)
        F.mse_loss(y, torch.zeros_like(y)).backward()
    return counted, flops.get_total_flops(), layers[0][0].weight.grad


def lesson() -> None:
    exact = 1 + STEPS * LR
    say("A weight of 1 after {steps} updates of 1/1024:", steps=STEPS)
    show([
        ("fp32", exact, add_updates(torch.float32, False)),
        ("bf16", 1.0, add_updates(torch.bfloat16, False)),
        (t("bf16 with a master copy in fp32"), round(exact * 128) / 128, add_updates(torch.bfloat16, True)),
    ])  # fmt: skip

    gradients = 2.0 ** torch.linspace(-40, -10, 3001)
    say("\nGradients from 2^-40 to 2^-10; fp16 keeps nothing below 2^-25. The share that is lost:")
    show([
        (t("loss scale {scale}", scale="1"), f"{15 / 30:.3f}", f"{lost_in_fp16(gradients, 1):.3f}"),
        (t("loss scale {scale}", scale="2^12"), f"{3 / 30:.3f}", f"{lost_in_fp16(gradients, 2.0**12):.3f}"),
    ])  # fmt: skip

    plain, plain_flops, expected = run(False, False)
    again, again_flops, gradient = run(True, False)
    away, _, same = run(False, True)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
    torch.testing.assert_close(same, expected, rtol=0, atol=0)
    one, products = 4 * BATCH * DIM, 2 * BATCH * DIM * DIM * LAYERS
    say("\n{layers} layers, each a matrix and a GELU:", layers=LAYERS)
    show([
        (t("bytes kept for backward"), one * 2 * LAYERS, plain.bytes),
        (t("with recomputation: bytes kept"), one * LAYERS, again.bytes),
        (t("operations"), 3 * products, plain_flops),
        (t("with recomputation: operations"), 4 * products, again_flops),
        (t("with offload: bytes moved out"), one * 2 * LAYERS, away.moved),
    ])  # fmt: skip
    with_weft()
    say("\nThe gradients of all three are equal, bit by bit.")


def with_weft() -> None:
    """Weft's loss scale after the same steps, and its plan of a 7B model with and without recomputation."""
    from weft import precision
    from weft.job.load import parse_job
    from weft.planner import make_plan

    mine, weft = LossScale(1024.0), precision.LossScale(True, value=1024.0, growth_interval=4)
    for finite in (True, True, False, True, True, True, True, True, False):
        mine.update(finite)
        weft.update(finite)
    say("\nThe loss scale after 9 steps, 2 of which overflow:")
    show([(t("loss scale"), mine.scale, weft.value)], ("by hand", "Weft"))
    say("\nLlama 7B on 8 H100, by Weft's planner:")
    for recompute in ("none", "selective", "full"):
        predicted = make_plan(parse_job({
            "model": {"shape": "llama-7b"}, "data": {"source": "synthetic", "seq_len": 2048}, "precision": "bf16",
            "train": {"global_batch": 64, "microbatch": 4}, "parallel": {"dp_shard": 8, "zero": 3},
            "memory": {"recompute": recompute}, "cluster": {"device": "h100-sxm", "devices_per_node": 8},
        }))[1].predicted  # fmt: skip
        say("recompute {recompute}: activations {gib:.1f} GiB, {seconds:.2f} s a step", recompute=recompute,
            gib=predicted["activations_gib"], seconds=predicted["step_time_s"])  # fmt: skip


if __name__ == "__main__":
    lesson()
