"""Groups that are made in every way, on 4 ranks, and what their operations give: groups.py BACKEND [INIT_METHOD]."""

import os
import sys

import by_name  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh


def mine():
    return torch.tensor([float(dist.get_rank())])


def place(group):
    return dist.get_process_group_ranks(group), dist.get_rank(group)


def total(group):
    sum = mine()
    dist.all_reduce(sum, group=group)
    return sum.item(), place(group)


def split_in_two():
    return total(dist.split_group(split_ranks=[[0, 1], [2, 3]]))


def split_off_in_descending_order():
    group = dist.split_group(split_ranks=[[3, 1]])
    return every_operation(group) if dist.get_rank() in (1, 3) else None


def new_group_of_some():
    group = dist.new_group([3, 0, 2])
    return every_operation(group) if dist.get_rank() != 1 else None


def new_group_of_all():
    return every_operation(dist.new_group([2, 1, 3, 0]))


def new_groups_by_their_members_alone():
    low = dist.get_rank() < 2
    return total(dist.new_group([0, 1] if low else [2, 3], use_local_synchronization=True))


def meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return [total(mesh[name].get_group()) for name in "ab"]


def functional_collectives():
    group = dist.group.WORLD
    gathered = functional.all_gather_tensor(mine(), 0, group)
    return functional.all_reduce(mine(), "sum", group).tolist(), gathered.tolist()


def coalesced():
    tensors = [mine(), torch.ones(3)]
    with dist._coalescing_manager():
        for t in tensors:
            dist.all_reduce(t)
    return [t.tolist() for t in tensors]


def every_operation(group):
    ranks, me = place(group)
    size, (first, last) = len(ranks), (ranks[0], ranks[-1])
    lists = [torch.zeros(1) for _ in ranks]
    dist.all_gather(lists, mine(), group=group)
    whole = torch.zeros(size)
    dist.all_gather_into_tensor(whole, mine(), group=group)
    part, part_of_list = torch.zeros(1), torch.zeros(1)
    dist.reduce_scatter_tensor(part, torch.arange(float(size)), group=group)
    if torch.__version__ >= "2.12":  # Gloo of 2.7 has it for one tensor alone
        dist.reduce_scatter(part_of_list, [torch.tensor([10.0 * i]) for i in range(size)], group=group)
    exchanged = torch.zeros(size)
    dist.all_to_all_single(exchanged, 100 * mine() + torch.arange(size), group=group)
    sent = mine()
    dist.broadcast(sent, src=last, group=group)
    share = torch.zeros(1)
    shares = [torch.tensor([float(i)]) for i in range(size)] if dist.get_rank() == first else None
    dist.scatter(share, shares, src=first, group=group)
    collected = [torch.zeros(1) for _ in ranks] if dist.get_rank() == last else None
    dist.gather(mine(), collected, dst=last, group=group)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": dist.get_rank()}, group=group)
    message = torch.zeros(1)
    if me == 0:
        dist.send(mine() + 7, group=group, group_dst=size - 1)
    elif me == size - 1:
        dist.recv(message, group=group, group_src=0)
    results = [lists, whole, part, part_of_list, exchanged, sent, share, collected, message]
    return ranks, me, objects, [r if r is None or isinstance(r, list) else r.tolist() for r in results]


# PyTorch before 2.15 splits no groups for tensors on the CPU, Gloo's neither.
SPLITS = [split_in_two, split_off_in_descending_order] if torch.__version__ >= (2, 15) else []
OTHERS = [new_group_of_some, new_group_of_all]
# Before PyTorch 2.14 Gloo hangs where members alone make a group after one of some ranks.
OTHERS.insert(2 if torch.__version__ >= "2.14" else 0, new_groups_by_their_members_alone)
WAYS = [*SPLITS, *OTHERS, meshes, functional_collectives, coalesced]


def main():
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    if sys.argv[2:]:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # before PyTorch 2.14 no rank makes a store under torchrun
    dist.init_process_group(sys.argv[1], **({"init_method": sys.argv[2], **place} if sys.argv[2:] else {}))
    for way in WAYS:
        print(f"rank {dist.get_rank()} {way.__name__} {way()}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
