"""环形算法发送多少。把每处 ... 换成你的答案，然后运行：weft lesson collectives --check"""


def bytes_sent(ranks: int, size: float) -> float:
    """对 `size` 字节的张量做环形 all-reduce 时，每个 rank 发送的字节数。"""
    return ...


def shard_to_send(rank: int, step: int, ranks: int) -> int:
    """在环形 all-gather 中，每个 rank 起初持有与自己编号相同的分片，并向 rank + 1 发送。返回 `rank` 在第 `step`
    步（从 0 数起）发送的分片编号：即它上一步收到的分片。"""
    return ...
