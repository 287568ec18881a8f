"""A shallow copy of a module shares its parameters, and takes others without changing the module."""

from torch import nn

from weft.extensions.hub.shallow_internals import shallow_copy


def test_a_copy_takes_other_children_and_parameters() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    copied = shallow_copy(module)
    copied[0] = shallow_copy(module[0])
    copied[0].weight = nn.Parameter(copied[0].weight + 1)
    assert copied[0].bias is module[0].bias and copied[0].weight is not module[0].weight
    assert not module[0].weight.equal(copied[0].weight)
