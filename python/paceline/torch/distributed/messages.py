"""Messages from one rank to another."""

from __future__ import annotations

from typing import Any

from paceline.common import abi
from paceline.common.engine import engine
from paceline.torch.distributed.memory import Memory, kind_of
from paceline.torch.distributed.operations import Operations, Tensors, one_tensor
from paceline.torch.distributed.work import PacelineWork


class Messages(Operations):
    """send and recv."""

    # dstRank, srcRank: as PyTorch calls them, for callers before 2.14.

    def send(self, tensors: Tensors, dstRank: int, tag: int) -> PacelineWork:
        """Sends a tensor to one rank, which receives it with the same tag."""
        one_tensor("send", tensors)
        _check_tag("send", tag)
        to, m = self._peer("send", dstRank), Memory(tensors[0])
        dtype, count = kind_of(m.host)

        def make() -> abi.Op:
            return self._group.op(abi.SEND, (count,), dtype, m.address(), 0, root=to, tag=tag)

        return self._run("send", make, [m], None, list(tensors), None)

    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> PacelineWork:
        """Receives the next tensor of a rank that has the tag."""
        return self._receive_message("recv", tensors, self._peer("recv", srcRank), tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> PacelineWork:
        """Receives the next tensor of any rank that has the tag; the work has the sender."""
        return self._receive_message("recvAnySource", tensors, abi.ANY_RANK, tag)

    def _receive_message(self, what: str, tensors: Tensors, source: int, tag: int) -> PacelineWork:
        one_tensor(what, tensors)
        _check_tag(what, tag)
        m, sender = Memory(tensors[0], filled=False), [source]
        dtype, count = kind_of(m.host)

        def finish(handles: Any) -> None:
            m.store()
            sender[0] = self._group.ranks.index(engine.result(handles[0])[2])

        def make() -> abi.Op:
            return self._group.op(abi.RECEIVE, (count,), dtype, 0, m.address(), root=source, tag=tag)

        work = self._run(what, make, [m], finish, list(tensors), None)
        work.sender = sender
        return work


def _check_tag(what: str, tag: int) -> None:
    if tag < 0:
        raise ValueError(f"{what}: tag {tag}: tags are not negative")
