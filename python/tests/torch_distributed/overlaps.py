"""Outputs of collectives in another part of their own input: sums come there after all of it has left; two ranks."""

import by_name  # noqa: F401
import torch
import torch.distributed as dist

N = 1 << 22  # elements that come in many partitions, of which some are still queued when others are back

dist.init_process_group("paceline")
rank = dist.get_rank()
rows = torch.tensor([[1.0], [10.0]]).expand(2, N) * (rank + 1)
sums = [3.0, 30.0]


def is_sum(output):
    """Whether the output is this rank's row."""
    return bool((output == sums[rank]).all())


for _ in range(5):
    for place in (0, N // 2, N):
        whole = rows.reshape(-1).clone()
        into = whole[place : place + N]
        dist.reduce_scatter_tensor(into, whole)
        assert is_sum(into), f"an output at {place} of its own input of {2 * N}"
    first, second = rows.reshape(-1).clone(), rows.reshape(-1).clone()
    outputs = [second[:N], first[N:]]  # each in the other's input
    dist.group.WORLD.reduce_scatter_tensor_coalesced(outputs, [first, second]).wait()
    assert is_sum(outputs[0]) and is_sum(outputs[1]), "outputs in one another's inputs"

    whole = torch.zeros(2, N)
    whole[1 - rank] = rank + 1
    dist.all_gather_into_tensor(whole, whole[1 - rank])
    assert bool((whole == torch.tensor([[1.0], [2.0]])).all()), "an output that has its input at another rank's place"
    whole = rows.reshape(-1).clone()
    dist.all_to_all_single(whole, whole)
    assert bool((whole.view(2, N) == sums[rank] / 3 * torch.tensor([[1.0], [2.0]])).all()), "an exchange in place"
print(f"rank {rank} is done\n", end="", flush=True)
dist.destroy_process_group()
