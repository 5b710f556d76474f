"""Gates, synchronisation models, codecs, checkpoints and the timeline."""

import functools
import json
import warnings

import numpy as np
import pytest
import tensorflow as tf
from check_training import KERAS_3, ROWS, assert_equal, assert_same_on_all_ranks, batches, compiled, fit, keras, part

import paceline
import paceline.keras as hvd_keras
import paceline.tensorflow as hvd


def on_the_tape(graph, **options):
    """A function of a variable and a number that returns the ranks' reduced gradient, which is that number."""

    def gradient(variable, value):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * value)
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, variable)

    return tf.function(gradient) if graph else gradient


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_a_gate_withholds_gradients_until_they_are_significant(rank, size, graph):
    weight = tf.Variable([10.0, 0.0])
    gradient = on_the_tape(graph, gate=paceline.Significance(0.25))
    own = tf.constant([float(rank + 1), 0.0])
    sums = [gradient(weight, own).numpy()[0] * size for _ in range(6)]
    wanted, withheld = [], [0.0] * size
    for _ in range(6):
        withheld = [w + r + 1 for r, w in enumerate(withheld)]
        wanted.append(sum(w for w in withheld if w >= 2.5))
        withheld = [w if w < 2.5 else 0.0 for w in withheld]
    assert sums == pytest.approx(wanted)


def test_a_gate_of_zero_changes_nothing(rank, size):
    wanted = fit(compiled(keras.optimizers.SGD(0.1), jit_compile=False), batches(size), rows=ROWS * size)
    model = compiled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), gate=paceline.Significance(0.0)))
    assert_equal(fit(model, part(batches(size), rank)), wanted)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_gate_for_a_keras_optimizer(rank, size, passes):
    options = {"backward_passes_per_step": passes, "gate": paceline.Significance(0.05, decay=0.5)}
    model = compiled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), **options))
    x, y = (np.concatenate(a) for a in zip(*batches(size), strict=True))
    before = model.evaluate(x, y, verbose=0)
    for _ in range(3):
        trained = fit(model, part(batches(size), rank, passes), rows=ROWS // passes)
    assert model.evaluate(x, y, verbose=0) < before
    assert_same_on_all_ranks(trained)


def test_a_checkpoint_has_what_gates_and_codecs_hold_back(rank):
    weight, coded = tf.Variable([10.0, 0.0]), tf.Variable(tf.zeros([4096]))
    gradient = on_the_tape(True, gate=paceline.Significance(0.25))
    topk = on_the_tape(True, compression=hvd.Compression.topk(0.01))
    values = tf.random.stateless_normal([4096], [1, rank])
    for _ in range(2):
        gradient(weight, tf.constant([1.0, 0.0]))
        topk(coded, values)
    state = paceline.compression_state()
    hvd.barrier()
    later = [gradient(weight, tf.constant([1.0, 0.0])).numpy(), topk(coded, values).numpy()]
    assert later[0].tolist() == [3.0, 0.0]
    hvd.barrier()
    paceline.load_compression_state(state)
    again = [gradient(weight, tf.constant([1.0, 0.0])).numpy(), topk(coded, values).numpy()]
    for a, b in zip(later, again, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="compression_state"):
        paceline.load_compression_state(state[:-1])


def test_a_checkpoint_has_what_a_gate_holds_back_of_parameters_that_servers_hold():
    variable = tf.Variable([10.0, 0.0], name="held back")
    sgd = keras.optimizers.SGD(1.0)
    optimizer = hvd_keras.DistributedOptimizer(sgd, sync=paceline.SSP(2), gate=paceline.Significance(0.25))
    optimizer.apply_gradients([(tf.constant([1.0, 0.0]), variable)])
    optimizer.agree()
    assert variable.numpy().tolist() == [10.0, 0.0]
    state = paceline.compression_state()
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    paceline.load_compression_state(state)
    optimizer.apply_gradients([(tf.constant([0.0, 0.0]), variable)])
    assert variable.numpy().tolist() == [9.0, 0.0]
    hvd.barrier()


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_ssp_of_zero_equals_one_process_with_all_batches(rank, size, eagerly):
    wanted = fit(compiled(keras.optimizers.SGD(0.1), jit_compile=False), batches(size), rows=ROWS * size)
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=paceline.SSP(0))
    model = compiled(optimizer, run_eagerly=eagerly)
    if rank and not eagerly:  # replaced by the lowest rank's when the step is traced, before there is a gradient
        model.set_weights([w + 1.0 for w in model.get_weights()])
    trained = fit(model, part(batches(size), rank))
    assert_equal(trained, wanted)
    assert_same_on_all_ranks(trained)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 gives variables their values when it makes them")
def test_a_model_that_is_not_built_says_what_to_do():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=paceline.SSP(0)), "mse", jit_compile=False
    )
    x = np.ones((4, 2), "float32")
    with pytest.raises(ValueError, match=r"has no value yet .* model\.build"):
        model.fit(x, x[:, :1], batch_size=2, verbose=0)


MODELS = [
    paceline.ASP(),
    paceline.SSP(3, parking="soft-barrier"),
    paceline.SSP(2, cached=True),
    paceline.DSPS(1, 4),
    paceline.PSSP(2, 0.5),
    paceline.DynamicPSSP(2),
    paceline.Adaptive(2, 2),
    paceline.ElasticBSP(4),
    paceline.Expression("lead < 2"),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.setting + ("-cached" if m.cached else ""))
def test_ranks_run_ahead_and_agree(rank, size, model):
    trains(rank, size, sync=model)


def test_ranks_run_ahead_with_gates_and_codecs(rank, size):
    gate = paceline.Significance(0.001)
    trains(rank, size, sync="ssp:2", gate=gate, pull_gate=gate, compression="fp16")
    trains(rank, size, sync="ssp:2", gate=gate, backward_passes_per_step=2)
    trains(rank, size, sync="ssp:2", pull_gate=paceline.Significance(0.0, decay=0.5))


@pytest.mark.parametrize("sync", ["bsp", "ssp:2"])
def test_a_codec_that_is_measured_is_the_same_on_all_ranks(rank, size, sync):
    auto = hvd.Compression.auto(candidates=["fp16", "int8"])
    trains(rank, size, sync=sync, compression=auto)


def trains(rank, size, **options):
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01), **options)
    net = compiled(optimizer)
    x, y = (np.concatenate(a) for a in zip(*batches(size), strict=True))
    before = net.evaluate(x, y, verbose=0)
    for _ in range(3):
        fit(net, part(batches(size), rank))
    optimizer.agree()
    assert_same_on_all_ranks(net.get_weights())
    assert net.evaluate(x, y, verbose=0) < before


def test_after_a_join_the_parameters_are_declared_anew(rank, size):
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), sync="ssp:1")
    model = compiled(optimizer)
    fit(model, part(batches(size), rank))
    optimizer.agree()
    weights = model.get_weights()
    model.set_weights([w + rank for w in weights])
    last = hvd.join()
    optimizer.agree()
    for ours, before in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(ours, before + last)
    with pytest.raises(tf.errors.InvalidArgumentError, match="traced for an earlier job"):
        fit(model, part(batches(size), rank))
    model.set_weights(weights)
    fit(model, part(batches(size), rank), [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
    optimizer.agree()
    assert_same_on_all_ranks(model.get_weights())


def test_stragglers_are_dropped(rank, size):
    wanted = fit(compiled(keras.optimizers.SGD(0.1), jit_compile=False), batches(size), rows=ROWS * size)
    model = compiled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=paceline.DropStragglers(size)))
    assert_equal(fit(model, part(batches(size), rank)), wanted)


def test_the_timeline_names_operations_of_graphs(rank, tmp_path):
    hvd.start_timeline(str(tmp_path / "trace.json"))
    for _ in range(2):
        tf.function(lambda: hvd.allreduce(tf.ones([8]), name="on the timeline"))()
    hvd.stop_timeline()
    text = (tmp_path / ("trace.json" if rank == 0 else f"trace.{rank}.json")).read_text()
    assert "on the timeline" in text and json.loads(text)


def test_dgc_says_that_momentum_is_its_own():
    kinds = [(hvd_keras, keras.optimizers.SGD), (hvd, functools.partial(tf.compat.v1.train.MomentumOptimizer, 0.1))]
    kinds += [] if KERAS_3 else [(hvd_keras, keras.optimizers.legacy.SGD)]
    for module, kind in kinds:
        with pytest.warns(UserWarning, match="dgc's momentum takes the place .*: give it momentum=0"):
            module.DistributedOptimizer(kind(momentum=0.9), compression=hvd.Compression.dgc(0.1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module.DistributedOptimizer(kind(momentum=0.0), compression=hvd.Compression.dgc(0.1))


def test_wrong_arguments():
    sgd = keras.optimizers.SGD
    with pytest.raises(ValueError, match="pull_gate"):
        hvd_keras.DistributedOptimizer(sgd(), pull_gate=paceline.Significance(0.1))
    with pytest.raises(ValueError, match="Significance"):
        hvd_keras.DistributedOptimizer(sgd(), gate=0.1)
    with pytest.raises(ValueError, match="the engine's codecs"):
        hvd_keras.DistributedOptimizer(sgd(), sync="ssp:1", compression=hvd.Compression.fp16)
    with pytest.raises(ValueError, match="wrap an optimizer of Keras"):
        hvd.DistributedGradientTape(tf.GradientTape(), sync="ssp:1")
    with tf.GradientTape() as tape:
        tape.watch(x := tf.constant([1.0]))
        y = x * x
    with pytest.raises(ValueError, match="gradients of variables"):
        hvd.DistributedGradientTape(tape, gate=paceline.Significance(0.1)).gradient(y, x)
