"""Choosing a layout by hand: memory and time of every way to spread a model. The text is in choosing_a_layout.md.

weft lesson choosing_a_layout
"""

from dataclasses import dataclass

from weft.cli.lessons.output import say, show

GIB = 2**30


@dataclass(frozen=True)
class Model:
    dim: int = 4096
    layers: int = 32
    ffn: int = 11008
    vocab: int = 32000

    @property
    def weights(self) -> int:
        return self.layers * (4 * self.dim**2 + 3 * self.dim * self.ffn) + 2 * self.vocab * self.dim


@dataclass(frozen=True)
class Machine:
    devices: int = 8
    memory: float = 39.4 * GIB
    flops: float = 312e12
    """Operations a second, by the data sheet."""
    efficiency: float = 0.6
    """The share of it that matrix products of this size reach."""
    link: float = 300e9
    """Bytes a second between two devices, one way."""


@dataclass(frozen=True)
class Layout:
    dp: int
    tp: int
    pp: int
    zero: int

    def __str__(self) -> str:
        return f"dp {self.dp} · tp {self.tp} · pp {self.pp} · zero {self.zero}"


MODEL, MACHINE, BATCH, LENGTH = Model(), Machine(), 64, 2048


def memory(layout: Layout) -> float:
    """Bytes of a device: states by the ZeRO lesson, activations of the microbatches that a stage keeps."""
    weights = MODEL.weights / layout.tp / layout.pp
    dp, zero = layout.dp, layout.zero
    if dp == 1:
        states = 18 * weights
    else:  # bf16 copy 2, fp32 gradients 4, master 4, moments 8: sharded from stage 3, 2, 1 and 1
        whole = (2 if zero < 3 else 0) + (4 if zero < 2 else 0)
        states = weights * (whole + (16 if zero > 1 else 12) / dp)
    token = MODEL.layers / layout.pp * 2 * (10 * MODEL.dim + (4 * MODEL.dim + 4 * MODEL.ffn) / layout.tp)
    return states + min(layout.pp, BATCH // dp) * LENGTH * token


def seconds(layout: Layout) -> float:
    """Seconds of a step: computing, stretched by the bubble, and the exchanges, as if nothing hid them."""
    dp, tp, pp, m = layout.dp, layout.tp, layout.pp, BATCH // layout.dp
    compute = 6 * MODEL.weights * BATCH * LENGTH / (MACHINE.devices * MACHINE.flops * MACHINE.efficiency)
    compute *= (m + pp - 1) / m
    sums = 4 * MODEL.layers / pp * 2 * (tp - 1) / tp * LENGTH * MODEL.dim * 2 * m / MACHINE.link
    times = {1: 2, 2: 1 + m, 3: 3 * m}[layout.zero]  # all-gathers and reduce-scatters of the weights
    replicas = times * (dp - 1) / dp * 2 * MODEL.weights / tp / pp / MACHINE.link
    return compute + sums + replicas


def layouts() -> list[Layout]:
    """Every way to write the devices as dp · tp · pp."""
    powers = [1, 2, 4, 8]
    degrees = [(d, s, p) for d in powers for s in powers for p in powers if d * s * p == MACHINE.devices]
    return [Layout(d, s, p, z) for d, s, p in degrees for z in ((1, 2, 3) if d > 1 else (1,)) if p == 1 or z == 1]


def lesson() -> None:
    fitting = sorted((x for x in layouts() if memory(x) < MACHINE.memory), key=seconds)
    say("Llama 7B, {batch} sequences of {length:,} tokens on {devices} A100 of 40 GB: {fit} of {all} layouts fit.",
        batch=BATCH, length=LENGTH, devices=MACHINE.devices, fit=len(fitting), all=len(layouts()))  # fmt: skip
    show([(str(x), f"{memory(x) / GIB:.1f} GiB", f"{seconds(x):.2f} s") for x in fitting], ("memory", "step"))
    with_weft(fitting)


def with_weft(fitting: list[Layout]) -> None:
    """Weft's plan of the same layouts, and the one that its search chooses."""
    from weft.job.load import parse_job
    from weft.planner import Plan, make_plan

    def planned(parallel: object) -> Plan:
        return make_plan(parse_job({
            "model": {"shape": "llama-7b"}, "data": {"source": "synthetic", "seq_len": LENGTH}, "precision": "bf16",
            "train": {"global_batch": BATCH, "microbatch": 1}, "parallel": parallel,
            "cluster": {"device": "a100-sxm-40gb", "devices_per_node": MACHINE.devices},
        }))[1]  # fmt: skip

    rows: list[tuple[str, object, object]] = []
    for layout in fitting[:4]:
        predicted = planned({"dp_shard": layout.dp, "tp": layout.tp, "pp": layout.pp, "zero": layout.zero}).predicted
        rows += [(f"{layout}: GiB", f"{memory(layout) / GIB:.1f}", f"{predicted['memory_gib']:.1f}"),
                 (f"{layout}: s", f"{seconds(layout):.2f}", f"{predicted['step_time_s']:.2f}")]  # fmt: skip
    say("\nThe first four, beside Weft's planner:")
    show(rows, ("by hand", "Weft"))
    best = planned("auto")
    axes = " ".join(f"{name} {degree}" for name, degree in best.axes.items() if degree > 1)
    say("\nWeft's search takes {axes} zero {zero}: {seconds:.2f} s a step.", axes=axes, zero=best.zero,
        seconds=best.predicted["step_time_s"])  # fmt: skip
    say("The fastest by hand: {layout}.", layout=fitting[0])


if __name__ == "__main__":
    lesson()
