"""The units of a model, which are spread one by one, their modules, and the values of their weights."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.mesh import Mesh
from weft.models.init import initialise


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are spread one by one: those the model names, else the members of its lists of layers."""
    if (names := getattr(model, "stage_units", None)) is not None:
        return {n: model.get_submodule(n) for n in names}
    pattern = getattr(model, "units", None)
    if isinstance(pattern, str):
        return {
            n: m for n, m in model.named_modules() if fnmatchcase(n, pattern) and n.count(".") == pattern.count(".")
        }
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name == n or name.startswith(f"{n}.") for n in found)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not inside:
            for key, child in module.named_children():
                callable_ = not isinstance(child, nn.ModuleList | nn.ModuleDict)  # FSDP2 needs a forward to hook
                if callable_ and any(True for _ in child.parameters()) and not _shares_parameters(model, child):
                    found[f"{name}.{key}" if name else key] = child
    return found


def _shares_parameters(model: nn.Module, child: nn.Module) -> bool:
    inside = {id(p) for p in child.parameters()}
    modules = {id(m) for m in child.modules()}
    return any(id(p) in inside for m in model.modules() if id(m) not in modules for p in m.parameters(recurse=False))


def members(model: nn.Module, prefix: str, skip: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """The modules at and below `prefix`, without those at and below the paths in `skip`."""

    def below(name: str, path: str) -> bool:
        return not path or name == path or name.startswith(path + ".")

    return [(n, m) for n, m in model.named_modules() if below(n, prefix) and not any(below(n, s) for s in skip)]


@torch.no_grad()
def materialise(
    model: nn.Module, modules: list[tuple[str, nn.Module]], mesh: Mesh, seed: int, dtype: torch.dtype
) -> None:
    """Give the modules' parameters values on this rank's device; tied parameters stay tied. Frozen weights of Weft's
    own models are stored in the compute dtype."""
    made: dict[int, nn.Parameter] = {}
    staged = hasattr(model, "stage")  # its ranks hold other weights, which were the same before it was cut
    described = any(p.is_meta for _, m in modules for p in m.parameters(recurse=False))  # one of Weft's own
    for path, module in modules:
        for key, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in made:
                value = param.detach()
                if param.is_meta:
                    value = torch.empty(param.shape, dtype=torch.float32, device=mesh.device)
                    name = f"{path}.{key}"
                    name = aliases_of(model).get(name, name)
                    initialise(name, value, model, seed, first=getattr(module, "first", 0))
                    value = value if param.requires_grad else value.to(dtype)
                else:
                    value = value.to(mesh.device) if staged else same_everywhere(value.to(mesh.device), mesh)
                made[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
            module.register_parameter(key, made[id(param)])
        for key, buffer in module.named_buffers(recurse=False):
            value = buffer.to(mesh.device)
            setattr(module, key, value if described or staged else same_everywhere(value, mesh))


def same_everywhere(value: Tensor, mesh: Mesh) -> Tensor:
    """The value that the first rank has."""
    if mesh.everyone is not None:
        value = value.contiguous()
        dist.broadcast(value, group=mesh.everyone.group, group_src=0)
    return value


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Other names of tied weights."""
    found: dict[str, str] = getattr(model, "aliases", {})
    return found
