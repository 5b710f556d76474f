"""A training with TensorFlow that goes on as ranks come and go, for test_tensorflow.py: SCRIPT DIRECTORY tape|fit.

Each rank writes a line whenever the training function begins and ends. The training ends when DIRECTORY/stop exists.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import horovod.keras as hvd_keras
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

stop, by_fit = Path(sys.argv[1]) / "stop", sys.argv[2] == "fit"
COMMIT_EVERY = 5
tf.config.threading.set_inter_op_parallelism_threads(2)

hvd.init()
keras = tf.keras
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
optimizer = keras.optimizers.Adam(0.01)
data = np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32)


def digest():
    values = state.optimizer.variables
    values = [*model.variables, *(values() if callable(values) else values)]
    return hashlib.sha256(b"".join(tf.convert_to_tensor(v).numpy().tobytes() for v in values)).hexdigest()[:16]


def say(what):
    place = {"process": int(os.environ["PACELINE_ELASTIC_PROCESS"]), "pid": os.getpid(), "resets": len(resets)}
    place["round"] = int(os.environ.get("PACELINE_ELASTIC_ROUND", "0"))  # 0: told only which place to expect
    place |= {"rank": hvd.rank(), "size": hvd.size(), "step": state.step, "digest": digest()}
    sys.stdout.write(json.dumps({"what": what} | place) + "\n")
    sys.stdout.flush()


class State(hvd_keras.elastic.KerasState):
    def commit(self):
        super().commit()
        if self.step == COMMIT_EVERY:
            say("committed")


def stops():
    return hvd.broadcast_object(stop.exists(), name="stop")


@tf.function
def one_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(x, training=True)))
    grads = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients([(grads[i], v) for i, v in enumerate(model.trainable_variables)])


class Count(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        state.step += 1

    def on_epoch_end(self, epoch, logs=None):
        if stops():
            self.model.stop_training = True


@hvd.elastic.run
def train(state):
    say("begin")
    assert state.step % COMMIT_EVERY == 0, state.step
    if by_fit:
        callbacks = [
            Count(),
            hvd_keras.elastic.UpdateBatchStateCallback(state),
            hvd_keras.elastic.UpdateEpochStateCallback(state),
            hvd_keras.elastic.CommitStateCallback(state, COMMIT_EVERY),
        ]
        model.fit(data, data[:, :3], batch_size=8, epochs=1_000_000, verbose=0, callbacks=callbacks)  # 5 batches each
        return
    while True:
        one_step(tf.constant(data[hvd.rank() :: hvd.size()][:8]))
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            state.commit()
            if stops():
                return


resets = []
if by_fit:
    model.compile(hvd_keras.DistributedOptimizer(optimizer), "mse")
    state = State(model, step=0, batch=0, epoch=0)
else:
    state = State(model, optimizer, step=0)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
if by_fit:
    assert state.epoch > 0 and state.batch == 0
say("end")
