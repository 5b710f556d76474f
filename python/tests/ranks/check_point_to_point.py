"""Messages from one rank to another: paceline.common.messages."""

import pytest
import torch

import paceline.torch as hvd
from paceline.common import messages


@pytest.fixture(autouse=True)
def the_job_goes_on(size):
    yield
    hvd.barrier()
    assert torch.equal(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


def send(tensor, to, tag=0, **options):
    return messages.send(tensor.data_ptr(), tensor.nbytes, to, tag, keep=tensor, **options)


def recv(tensor, source=messages.ANY, tag=0, **options):
    return messages.recv(tensor.data_ptr(), tensor.nbytes, source, tag, keep=tensor, **options)


@pytest.mark.parametrize("length", [0, 1, 4096, 100_003, 16 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_all_pairs_exchange_tensors_in_both_directions(length, dtype, rank, size):
    if length > 1 << 20 and dtype != torch.float32:
        pytest.skip("bytes are bytes")
    tensors = {peer: (torch.arange(length) % 251 + 10 * rank + peer).to(dtype) for peer in range(size)}
    into = {peer: torch.zeros(length, dtype=dtype) for peer in range(size)}
    ends = [send(tensors[peer], peer, tag=length) for peer in range(size)]
    receives = {peer: recv(into[peer], peer, tag=length) for peer in range(size)}
    for end in [*ends, *receives.values()]:
        end.wait()
    for peer in range(size):
        assert receives[peer].source == peer
        assert torch.equal(into[peer], (torch.arange(length) % 251 + 10 * peer + rank).to(dtype))


def test_messages_keep_their_order_and_their_tags(rank, size):
    count = 500
    right, left = (rank + 1) % size, (rank - 1) % size
    sends = [send(torch.tensor([i]), right, tag=2**64 - 1 - i % 2) for i in range(count)]
    into = torch.zeros(2, count // 2, dtype=torch.int64)
    receives = [recv(into[t, i : i + 1], left, tag=2**64 - 1 - t) for t in (1, 0) for i in range(count // 2)]
    for end in sends + receives:
        end.wait()
    assert into.tolist() == [list(range(0, count, 2)), list(range(1, count, 2))]


def test_a_receive_from_any_rank_knows_its_source(rank, size):
    if rank > 0:
        send(torch.full((3,), rank), 0, tag=1).wait()
        return
    seen = set()
    for _ in range(size - 1):
        into = torch.zeros(3, dtype=torch.int64)
        end = recv(into, tag=1)
        with pytest.raises(ValueError, match="when wait"):
            _ = end.source
        end.wait()
        assert into.tolist() == [end.source] * 3
        seen.add(end.source)
    assert seen == set(range(1, size))


@pytest.mark.parametrize(("sent", "room"), [(8, 4), (4, 8), (100_000, 4), (4, 100_000)])
def test_a_wrong_length_is_an_error_at_both_ends(sent, room, rank):
    if rank > 1:
        return
    end = send(torch.zeros(sent), 1, tag=5) if rank == 0 else recv(torch.zeros(room), 0, tag=5)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        end.wait()
    for part in ("rank 0", "rank 1", "tag 5", str(4 * sent), str(4 * room)):
        assert part in str(caught.value)
    with pytest.raises(hvd.HorovodInternalError):
        end.wait()


def test_a_timeout_names_who_did_not_come(rank, size):
    if rank > 0:
        return
    for end in (recv(torch.zeros(1), 1, tag=6, timeout=0.05), send(torch.zeros(1), 1, tag=6, timeout=0.05)):
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 with tag 6 on rank 0 has waited 50ms for rank 1"):
            end.wait()


def test_arguments_out_of_bounds(rank, size):
    for call in (
        lambda: send(torch.zeros(1), size),
        lambda: send(torch.zeros(1), messages.ANY),
        lambda: recv(torch.zeros(1), -2),
        lambda: send(torch.zeros(1), 0, tag=2**64),
        lambda: send(torch.zeros(1), 0, tag=-1),
    ):
        with pytest.raises(ValueError):
            call()
