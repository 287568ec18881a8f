"""Inputs that once gave a traceback, a slow answer or a wrong one; each is run again before random inputs."""

from __future__ import annotations

OVERRIDES: tuple[str, ...] = (
    "model.heads=1000000000007", "model.layers=1000000000", "data.seq_len=99999999999999999999999999", "name=off",
    "name=null",
    'runs_dir="a\\0b"', "train.steps=1e400", "train.steps=yes", "cluster.device=4090", "optim.betas=[0.9, 9e999]",
    "train.batch_ramp=[[1]]", "train.batch_ramp={from: 8}", "parallel.split=[]", "extensions=[os; rm]", "model=&a [*a]",
    "fp8.skip=[off]", "train.sync=diloco:", "comm.compression=topk:nan",
)  # fmt: skip

JOB_FILES: tuple[bytes, ...] = (
    b"", b"\xff\xfe", b"[]", b"1", b"a: &a [*a]\n", b"name: off\n", b"train: {steps: 1}\ntrain: {steps: 2}\n",
    b"model:\n",
    b"x: !!python/object/apply:os.system ['true']\n", b"a: " + b"[" * 3000, b"name: '\\0'\n",
    b"train: {steps: " + b"9" * 5000 + b"}",
    b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\n"
    b"c: &c [*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c,*c,*c]\n",
)  # fmt: skip

ARGUMENTS: tuple[tuple[str, ...], ...] = (
    (), ("--json",), ("plan",), ("plan", "--json"), ("chaos", "tiny", "--faults", "random:99999999999", "--json"),
    ("generate", "old", "--temperature", "1e-300"), ("generate", "old", "--seed", str(2**70), "--json"),
    ("export", "old", "--out", "."), ("data", "build", "text.txt", "--out", "store", "--tokenizer",
    "bpe:99999999999999999999"),
    ("plan", "tiny", "--why-not", ""), ("plan", "tiny", "--compare", ":"), ("plan", "tiny", "--tokens", "nan"),
    ("train", "tiny", "name=..", "runs_dir=."), ("report", "..", "--json"), ("estimate", "--table", ".", "--json"),
    ("plan", "tiny", "data.source=store", "--json"), ("prove", "tiny", "--layouts", "dd2", "--json"), ("lesson",
    "../x"),
)  # fmt: skip
