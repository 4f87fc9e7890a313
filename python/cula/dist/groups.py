# SPDX-License-Identifier: Apache-2.0
"""What counts as a group of ranks: its size and this process's rank in it, checked against what the caller
says."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# A process group, a mesh of one dimension (`mesh["cp"]`), or a mesh and the number or name of a dimension.
GroupLike = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str]


@dataclass(frozen=True)
class Group:
    process_group: (
        dist.ProcessGroup | None
    )  # None: nothing can be exchanged, which cutting heads does not need
    size: int
    rank: int


def resolve(
    prefix: str, group: GroupLike | None, size: int | None, rank: int | None, *, required: bool
) -> Group:
    """The group of the arguments `{prefix}_group`, `{prefix}_size` and `{prefix}_rank`.

    Size and rank default to the group's. Without a group, where none is required, the size defaults to 1 and
    the rank of a size of 1 to 0.
    """
    _check_int(f"{prefix}_size", size)
    _check_int(f"{prefix}_rank", rank)
    if group is None and required:
        raise ValueError(f"{prefix}_group must be a process group or a mesh dimension, got None")
    found = None if group is None else _process_group(f"{prefix}_group", group)
    if found is None:
        size = 1 if size is None else size
        if rank is None and size != 1:
            raise ValueError(
                f"{prefix}_rank must be given with {prefix}_size when {prefix}_group is None, got None"
            )
        rank = 0 if rank is None else rank
        if size < 1:
            raise ValueError(f"{prefix}_size must be at least 1, got {size}")
    else:
        own_rank, own_size = dist.get_rank(found), dist.get_world_size(found)
        if own_rank < 0:
            raise ValueError(f"{prefix}_group must contain this process, rank {dist.get_rank()} is not in it")
        if size is not None and size != own_size:
            raise ValueError(f"{prefix}_size must be the size of {prefix}_group, {own_size}, got {size}")
        if rank is not None and rank != own_rank:
            raise ValueError(
                f"{prefix}_rank must be this process's rank in {prefix}_group, {own_rank}, got {rank}"
            )
        size, rank = own_size, own_rank
    if not 0 <= rank < size:
        raise ValueError(f"{prefix}_rank must lie in [0, {size}), got {rank}")
    return Group(found, size, rank)


def _process_group(argument: str, group: object) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns to processes outside of it
        raise ValueError(f"{argument} must contain this process, rank {dist.get_rank()} is not in it")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{argument} must be a mesh of one dimension, got {group.ndim}: select one, mesh[name]"
            )
        return group.get_group()
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return group[0].get_group(group[1])
    raise TypeError(f"{argument} must be a process group or a mesh dimension, got {type(group).__name__}")


def _check_int(argument: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise TypeError(f"{argument} must be of type int, got {type(value).__name__}")
