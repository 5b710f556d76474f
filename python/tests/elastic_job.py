"""A training that goes on as ranks come and go, for test_elastic.py: `elastic_job.py DIRECTORY`.

Each rank writes a line whenever the training function begins and ends. The training ends when DIRECTORY/stop exists.
JOB_PREPARES: processes that come later wait for DIRECTORY/ready before the training function, and all write a line at
each commit too. JOB_BEFORE: all take part in a sum before the training function, and in each reset callback.
JOB_OPTIONS: the optimizer's, in JSON. JOB_SETTINGS: init's. JOB_METRIC: a sum follows each step. JOB_EVERY: steps for
each commit. JOB_DIGESTS=no: commits have no digest, whose computation would wait for the step. DIRECTORY/die: rank 0
of the first round kills itself before step 20.
"""

import hashlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

hvd = importlib.import_module(os.environ.get("JOB_MODULE", "paceline.torch"))
stop, commits = Path(sys.argv[1]) / "stop", os.environ.get("JOB_COMMITS", "yes") == "yes"
prepares, before = "JOB_PREPARES" in os.environ, "JOB_BEFORE" in os.environ
SAMPLES, BATCH, COMMIT_EVERY = 96, 4, int(os.environ.get("JOB_EVERY", "5"))

hvd.init(settings=json.loads(os.environ.get("JOB_SETTINGS", "null")))
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
options = json.loads(os.environ.get("JOB_OPTIONS", "{}"))
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)))
sampler = hvd.elastic.ElasticSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)


def digest():
    values = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in values)).hexdigest()[:16]


def say(what, state):
    place = {"process": int(os.environ["PACELINE_ELASTIC_PROCESS"]), "pid": os.getpid(), "resets": len(resets)}
    place["round"] = int(os.environ.get("PACELINE_ELASTIC_ROUND", "0"))  # 0: told only which place to expect
    place["host"] = os.environ["PACELINE_HOST"]
    place |= {"rank": hvd.rank(), "local_rank": hvd.local_rank(), "size": hvd.size()}
    place |= {"step": state.step, "digest": digest()}
    sys.stdout.write(json.dumps({"what": what} | place) + "\n")
    sys.stdout.flush()


def stops():
    """Whether a rank is told to end; a broadcast would fail where its root is lost."""
    return bool(hvd.allreduce(torch.tensor(int(stop.exists())), op=hvd.Max, name="stop"))


@hvd.elastic.run
def train(state):
    say("begin", state)
    assert state.digest in ("", digest()), "the state is not what was committed"
    assert state.step % COMMIT_EVERY == 0, state.step
    assert state.seen in ([], [sampler.epoch, sampler.processed_num]), (state.seen, sampler.state_dict())
    while True:
        for i, (x,) in enumerate(loader):
            if hvd.rank() == 0 and state.step == 20 and not resets and (stop.parent / "die").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            if "JOB_METRIC" in os.environ:
                hvd.allreduce(torch.ones(1), name="metric")
            sampler.record_batch(i, len(x))
            state.step += 1
            if state.step % COMMIT_EVERY == 0 and commits:
                state.digest = digest() if os.environ.get("JOB_DIGESTS") != "no" else ""
                state.seen = [sampler.epoch, sampler.processed_num]
                state.commit()
                if prepares:
                    say("commit", state)
            if state.step % COMMIT_EVERY == 0 and stops():
                return
        sampler.set_epoch(sampler.epoch + 1)


resets = []
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, step=0, digest="", seen=[])
state.register_reset_callbacks([lambda: resets.append(hvd.size())])


def sum_before():
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="before") == hvd.size()


if prepares and int(os.environ["PACELINE_ELASTIC_PROCESS"]) >= 2:
    say("prepare", state)
    while not (stop.parent / "ready").exists():
        time.sleep(0.02)
if before:
    state.register_reset_callbacks([sum_before])
    sum_before()
train(state)
say("end", state)
