"""PyTorch's own tests of torch.distributed, as its wheel has them, for the backend that BACKEND names.

Run by test_torch_distributed.py, and by hand: BACKEND=gloo WORLD_SIZE=3 TEMP_DIR=/tmp python -m pytest suite.py
With PACELINE_TAKEOVER=gloo the tests of Gloo are those of Paceline. A rank is a fork of this process: a new
interpreter would need seconds to import PyTorch, for each rank of each test.
"""

import os

# Seconds until a test that hangs fails and its ranks are killed; PyTorch reads it as it is imported.
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "600")

import torch
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import DdpComparisonTest, DdpUnderDistAutogradTest
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend
from torch.testing._internal.distributed.rpc.rpc_test import RpcTest, TensorPipeAgentRpcTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

torch.set_num_threads(1)
if torch.__version__ < "2.12":  # 2.7's profiler drops what ends on another thread than it began
    distributed_test.PROFILING_SUPPORTED_BACKENDS = distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []


class Forks(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def tearDown(self):
        for process in self.processes:
            process.kill()  # those of a test that has hung; the others have ended
            process.join()
        super().tearDown()


class TestDistributed(Forks, TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()


instantiate_parametrized_tests(TestDistributed)


# Those of RPC that have a process group too, which is Gloo's by name.
class TestDdpUnderDistAutograd(TensorPipeRpcAgentTestFixture, DdpUnderDistAutogradTest, Forks):
    pass


class TestDdpComparison(TensorPipeRpcAgentTestFixture, DdpComparisonTest, Forks):
    pass


class TestRpc(TensorPipeRpcAgentTestFixture, TensorPipeAgentRpcTest, RpcTest, Forks):
    pass


BESIDE_RPC = {
    "test_deadlock",
    "test_dynamic_and_static_init_rpc_together",
    "test_init_pg_then_rpc",
    "test_init_rpc_then_pg",
    "test_pg_init_no_rpc_init",
}
for name in [n for n in dir(TestRpc) if n.startswith("test_") and n not in BESIDE_RPC]:
    setattr(TestRpc, name, None)
