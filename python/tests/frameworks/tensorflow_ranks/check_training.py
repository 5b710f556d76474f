"""Training with the tape and with Keras: the numbers are those of one process with the batches of all ranks."""

import time

import numpy as np
import pytest
import tensorflow as tf

import paceline
import paceline.keras as hvd_keras
import paceline.tensorflow as hvd
from paceline.tensorflow._glue import asynchronous
from paceline.tensorflow.gradients import _name_of

keras = tf.keras
KERAS_3 = hasattr(keras.optimizers.Optimizer, "apply")

STEPS, ROWS = 6, 8


def network():
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)])


def batches(size):
    """For each step the batches of all ranks one after the other."""
    random = np.random.default_rng(3)
    return [
        (random.standard_normal((ROWS * size, 5), np.float32), random.integers(0, 3, ROWS * size)) for _ in range(STEPS)
    ]


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def by_tape(model, optimizer, data, wrap=lambda tape: tape, graph=True):
    """The model's weights after training by a loop over the batches."""
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        gradients = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905, which tf.function of TensorFlow 2.12 lacks

    step = tf.function(step) if graph else step
    for x, y in data:
        step(tf.constant(x), tf.constant(y))
    return model.get_weights()


def part(data, rank, passes=1):
    """A rank's rows of each batch; passes: in so many pieces, one after the other."""
    mine = [(x[rank * ROWS :][:ROWS], y[rank * ROWS :][:ROWS]) for x, y in data]
    return [(a, b) for x, y in mine for a, b in zip(np.split(x, passes), np.split(y, passes), strict=True)]


def assert_equal(weights, others, tolerance=2e-6):
    for ours, theirs in zip(weights, others, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_same_on_all_ranks(weights):
    for other in hvd.allgather_object([w.tobytes() for w in weights]):
        assert other == [w.tobytes() for w in weights]


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_predivide_factor": 4.0}, {"groups": 2}, {"compression": "none"}, {"sync": "bsp"}],
    ids=str,
)
def test_the_tape_gives_the_gradients_of_all_ranks(rank, size, options, graph):
    wanted = by_tape(network(), keras.optimizers.Adam(0.01), batches(size))
    trained = by_tape(
        network(),
        keras.optimizers.Adam(0.01),
        part(batches(size), rank),
        lambda tape: hvd.DistributedGradientTape(tape, **options),
        graph,
    )
    assert_equal(trained, wanted)
    assert_same_on_all_ranks(trained)


def test_embeddings_have_sparse_gradients(rank, size):
    for dense in (False, True):
        table = tf.Variable(tf.ones([10, 4]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank, rank, 9]))
        grad = hvd.DistributedGradientTape(tape, sparse_as_dense=dense).gradient(loss, table)
        assert isinstance(grad, tf.IndexedSlices) != dense
        want = np.zeros((10, 4))
        for r in range(size):
            want[r] += 2 / size
        want[9] = 1
        np.testing.assert_allclose(tf.convert_to_tensor(grad), want, rtol=1e-6)


def test_local_sources_stay_on_their_rank(rank, size):
    shared, own = tf.Variable(1.0), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = (shared + own) * float(rank + 1)
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(own)
    grads = tape.gradient(loss, {"shared": shared, "own": own})
    assert float(grads["shared"]) == pytest.approx(np.mean([r + 1 for r in range(size)]))
    assert float(grads["own"]) == pytest.approx((rank + 1) / size)


def late(rank, here):
    """A function of a tensor whose gradient is made late on one rank."""

    def wait(grad):
        time.sleep(0.4 * (rank == here))  # longer than the others take, so that the order differs between ranks
        return grad

    @tf.custom_gradient
    def same(x):
        def backward(grad):
            waited = tf.numpy_function(wait, [grad], tf.float32, stateful=False)
            waited.set_shape(grad.shape)
            return waited

        return tf.identity(x), backward

    return same


def test_gradients_have_names_whatever_a_rank_has_traced_before(rank, size):
    """In an elastic job a rank that has come later traces functions that the others have had for long."""
    head, base = (tf.Variable(tf.ones(3), name=f"traced {part}") for part in ("head", "base"))
    if rank == 0:
        _name_of(head, 0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(base * (rank + 1.0)) + tf.reduce_sum(head)
    first, second = hvd.DistributedGradientTape(tape).gradient(loss, [base, head])
    assert first.numpy().tolist() == [(size + 1) / 2] * 3 and second.numpy().tolist() == [1.0] * 3


@pytest.mark.skipif(not KERAS_3, reason="generators are variables in Keras 3")
def test_a_broadcast_leaves_each_rank_its_random_numbers(rank, size):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5, seed=rank), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    states = hvd.allgather_object([v.numpy().tolist() for v in model.non_trainable_variables])
    assert states[0] and len({str(state) for state in states}) == size
    assert len({str(weights) for weights in hvd.allgather_object([w.tolist() for w in model.get_weights()])}) == 1


def test_a_model_that_one_rank_has_loaded_or_made_late_trains_with_the_others(rank, size, tmp_path):
    """Its variables have other paths: rank 0 goes on from a file, the others have made another model before."""
    if rank > 0:
        network()
    model = compiled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    if rank == 0:
        model.save(tmp_path / "model.keras")
        model = hvd_keras.load_model(tmp_path / "model.keras")
    data = part(batches(size), rank)
    fit(model, data, [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_same_on_all_ranks(model.get_weights())
    hvd.broadcast_variables(model.weights, root_rank=0)
    with tf.GradientTape() as tape:
        loss = LOSS(data[0][1], model(data[0][0]))
    grads = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    assert_same_on_all_ranks([g.numpy() for g in grads])
    keras.backend.clear_session()  # the next model has the same paths on all ranks


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_ranks_outside_of_the_process_set_keep_their_gradients(rank, size, graph):
    some = hvd.add_process_set([0])
    others = hvd.add_process_set(range(1, size))
    own = part(batches(size), rank)
    wanted = by_tape(network(), keras.optimizers.SGD(0.1), own)
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=some)
    assert_equal(by_tape(network(), optimizer, own, graph=graph), wanted)
    trained = by_tape(
        network(),
        keras.optimizers.SGD(0.1),
        own,
        lambda tape: hvd.DistributedGradientTape(tape, process_set=others, gate=paceline.Significance(0.0)),
        graph,
    )
    if rank == 0 or size == 2:
        assert_equal(trained, wanted)
    for process_set in some, others:
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("passes", [1, 2], ids="passes {}".format)
def test_where_losses_are_scaled_all_ranks_skip_the_same_steps(rank, size, passes):
    """Keras wraps the given optimizer for mixed_float16, and looks at a rank's own gradients for what is not finite."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes)
        model = compiled(optimizer)
        before = model.get_weights()
        data = part(batches(size), rank)
        data[1] = (data[1][0] * (float("inf") if rank == size - 1 else 1), data[1][1])
        fit(model, data[:2])
        scale = model.optimizer.dynamic_scale if KERAS_3 else model.optimizer.loss_scale
        assert hvd.allgather(tf.reshape(tf.cast(scale, tf.float32), [1])).numpy().tolist() == [2.0**14] * size
        assert_same_on_all_ranks(model.get_weights())
        fit(model, data[2:])
        assert_same_on_all_ranks(model.get_weights())
        assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
        assert np.isfinite(model.get_weights()[0]).all()
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("around", [True, False], ids=["around ours", "within ours"])
def test_ranks_skip_the_same_steps_where_gradients_are_left_to_a_rank(rank, size, around):
    kind = keras.optimizers.LossScaleOptimizer if KERAS_3 else keras.mixed_precision.LossScaleOptimizer
    shared, own = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = keras.optimizers.SGD(1.0)
    if around:
        inner = hvd_keras.DistributedOptimizer(optimizer)
        optimizer, registers = kind(inner), inner
    else:
        optimizer = registers = hvd_keras.DistributedOptimizer(kind(optimizer))
    registers.register_local_var(own)
    optimizer.build([shared, own])
    bad = tf.constant([float("inf") if rank == size - 1 else 1.0])
    for grad, steps in (bad, 0), (tf.constant([1.0]), 1):
        before = shared.numpy().tolist()
        if KERAS_3:
            optimizer.apply([tf.constant([1.0]), grad], trainable_variables=[shared, own])
        else:
            optimizer.apply_gradients(grads_and_vars=[(tf.constant([1.0]), shared), (grad, own)])
        assert (shared.numpy().tolist() != before) == steps
    assert_same_on_all_ranks([shared.numpy()])


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 shares the optimizer's state")
def test_what_an_optimizer_says_of_its_configuration_counts(rank):
    class Warm(keras.optimizers.SGD):
        def __init__(self, learning_rate=0.1, **options):
            super().__init__(keras.optimizers.schedules.PolynomialDecay(learning_rate, 10), **options)
            self.base = learning_rate

        def get_config(self):
            return super().get_config() | {"learning_rate": self.base}

    assert float(hvd_keras.DistributedOptimizer(Warm(0.5)).learning_rate) == pytest.approx(0.5)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of a program, which has no configuration."""

    def __call__(self, step):
        return 0.5 / (1.0 + tf.cast(step, tf.float32))


class Own(keras.optimizers.SGD):
    """An optimizer of a program, which Keras does not know."""


@pytest.mark.parametrize("rate", [Halving(), lambda: 0.25], ids=["schedule", "function"])
def test_optimizers_and_schedules_of_a_program_are_wrapped(rank, size, rate):
    kinds = [lambda: keras.optimizers.SGD(rate), lambda: Own(rate)]
    if KERAS_3:
        kinds.append(lambda: keras.optimizers.LossScaleOptimizer(Own(rate), initial_scale=1.0))
    for make in kinds:
        wanted = by_tape(network(), make(), batches(size))
        assert_equal(by_tape(network(), hvd_keras.DistributedOptimizer(make()), part(batches(size), rank)), wanted)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 has no such optimizers")
def test_a_wrapped_optimizer_excludes_from_weight_decay_what_was_excluded():
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    for given in (optimizer, keras.optimizers.LossScaleOptimizer(optimizer)):
        wrapped = hvd_keras.DistributedOptimizer(given)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        inner = getattr(wrapped, "inner_optimizer", wrapped)
        wrapped.build(model.trainable_variables)
        assert [inner._use_weight_decay(v) for v in model.trainable_variables] == [True, False]


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"gate": paceline.Significance(1e-9)}], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["one function", "within another"])
def test_gradients_of_one_variable_for_two_losses_are_not_mixed(rank, size, options, nested):
    """They are ready in another order on each rank, and reductions in a graph run in the order in which they are."""
    if not asynchronous:
        pytest.skip("kernels that wait run in the program's order")  # so that nothing can be mixed
    variables = [tf.Variable([1.0]), tf.Variable([2.0])]

    def gradients(factor, on):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(late(rank, on)(v * factor)) for v in variables])
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)

    def of_two_tapes():
        functions = [tf.function(gradients), tf.function(gradients)] if nested else [gradients, gradients]
        return [f(1.0 + 99.0 * on, on) for on, f in enumerate(functions)]

    step = tf.function(of_two_tapes)
    step.get_concrete_function()
    for _ in range(2):
        hvd.barrier()
        assert [[float(g[0]) for g in grads] for grads in step()] == [[1.0, 1.0], [100.0, 100.0]]


def test_ranks_in_different_branches_meet_by_generic_names_and_names_that_are_given(rank, size):
    weights = [tf.Variable([1.0, 2.0]), tf.Variable([3.0]), tf.Variable([4.0])]

    def branch(power):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(w**power) for w in weights[::2])
        grads = hvd.DistributedGradientTape(tape).gradient(loss, weights, use_generic_names=True)
        return grads[0], grads[2], hvd.allreduce(tf.constant(float(power)), op=hvd.Sum, name="of the branches")

    @tf.function
    def step(first):
        return tf.cond(first, lambda: branch(2), lambda: branch(1))

    def mean(value):  # rank 0 has the derivative 2 w, the others 1
        return (2 * value + size - 1) / size

    for _ in range(2):
        first, last, powers = step(tf.constant(rank == 0))
        np.testing.assert_allclose(first, [mean(1), mean(2)])
        np.testing.assert_allclose(last, [mean(4)])
        assert powers == size + 1


@pytest.mark.parametrize("graph", [False, True])
def test_jacobians_are_those_of_all_ranks(rank, size, graph):
    variable = tf.Variable([1.0, 2.0])
    mean = sum(range(1, size + 1)) / size

    def jacobians():
        with tf.GradientTape(persistent=True) as tape:
            rows = tf.ones([3, 2]) * tf.convert_to_tensor(variable)
            tape.watch(rows)
            squares, doubles = (rank + 1.0) * variable**2, rows * (rank + 1.0)
        tape = hvd.DistributedGradientTape(tape)
        return tape.jacobian(squares, variable), tape.batch_jacobian(doubles, rows), tape.gradient(squares, variable)

    whole, each, gradient = (tf.function(jacobians) if graph else jacobians)()
    np.testing.assert_allclose(whole, mean * np.diag([2.0, 4.0]))
    np.testing.assert_allclose(each, [mean * np.eye(2)] * 3)
    np.testing.assert_allclose(gradient, [2 * mean, 4 * mean])


def test_a_distributed_tape_is_not_wrapped_again(rank, size):
    with pytest.raises(ValueError, match="reduced twice"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))


def test_a_persistent_tape_gives_gradients_of_several_losses(rank, size):
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def step(factor):
        with tf.GradientTape(persistent=True) as tape:
            losses = [tf.reduce_sum(variable * factor), tf.reduce_sum(variable * 100.0 * factor)]
        tape = hvd.DistributedGradientTape(tape)
        return [tape.gradient(loss, variable)[0] for loss in losses]

    for factor in (1.0, 2.0):  # which is traced anew
        assert [float(g) for g in step(factor)] == [factor, 100.0 * factor]


def test_calls_of_one_function_are_not_mixed(rank, size):
    """Both only read the variable, so that TensorFlow would run them in any order."""
    variable = tf.Variable([1.0])

    @tf.function
    def gradient(factor, here):
        def wait(grad, here):
            time.sleep(0.4 * (rank == here))  # as in `late`
            return grad

        with tf.GradientTape() as tape:
            late = tf.numpy_function(wait, [factor, here], tf.float32, stateful=False)
            late.set_shape([])
            loss = tf.reduce_sum(variable * late)
        return hvd.DistributedGradientTape(tape).gradient(loss, variable)

    @tf.function
    def both():
        return [gradient(tf.constant(f), tf.constant(here)) for here, f in enumerate((1.0, 100.0))]

    both.get_concrete_function()
    for _ in range(2):
        hvd.barrier()
        assert [float(t[0]) for t in both()] == [1.0, 100.0]


def test_operations_without_names_in_functions_of_one_name_are_not_mixed(rank, size):
    """Both calls read a variable only, so that TensorFlow runs them in any order."""
    if not asynchronous:
        pytest.skip("kernels that wait run in the program's order")  # so that nothing can be mixed
    variable = tf.Variable([1.0])

    def scaled(factor, on):
        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(late(rank, on)(variable * factor))
            return hvd.allreduce(tape.gradient(loss, variable))

        return step

    both = tf.function(lambda: [scaled(1.0, 0)(), scaled(100.0, 1)()])
    both.get_concrete_function()
    hvd.barrier()
    assert [float(t[0]) for t in both()] == [1.0, 100.0]


def compiled(optimizer, **options):
    model = network()
    model.compile(optimizer, LOSS, **options)
    return model


def fit(model, data, callbacks=(), rows=ROWS):
    x, y = (np.concatenate(a) for a in zip(*data, strict=True))
    model.fit(x, y, batch_size=rows, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_fit_equals_one_process_with_all_batches(rank, size, eagerly):
    wanted = fit(compiled(keras.optimizers.SGD(0.1, momentum=0.9), jit_compile=False), batches(size), rows=ROWS * size)
    model = compiled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), run_eagerly=eagerly)
    assert not model.jit_compile and type(model.optimizer).__name__ == "SGD"
    if rank:
        model.set_weights([w + 1.0 for w in model.get_weights()])
    broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    trained = fit(model, part(batches(size), rank), [broadcast])
    assert broadcast.broadcast_done
    assert_equal(trained, wanted)
    assert_same_on_all_ranks(trained)


@pytest.mark.parametrize("average", [False, True])
def test_several_passes_before_each_step(rank, size, average):
    rate = 0.1 if average else 0.05  # the sum of two passes is twice their average
    wanted = fit(compiled(keras.optimizers.SGD(0.1), jit_compile=False), batches(size), rows=ROWS * size)
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(rate), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    model = compiled(optimizer)
    trained = fit(model, part(batches(size), rank, 2), rows=ROWS // 2)
    assert_equal(trained, wanted)
    assert int(optimizer.iterations) == 2 * STEPS
    assert_same_on_all_ranks(trained)


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, "int8", hvd.Compression.topk(0.25)], ids=str)
def test_codecs_train(rank, size, compression):
    model = compiled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression))
    x, y = np.concatenate([b[0] for b in batches(size)]), np.concatenate([b[1] for b in batches(size)])
    before = model.evaluate(x, y, verbose=0)
    for _ in range(4):
        trained = fit(model, part(batches(size), rank))
    assert model.evaluate(x, y, verbose=0) < before
    assert_same_on_all_ranks(trained)


@pytest.mark.skipif(KERAS_3, reason="Keras 3 has one kind of optimizers")
@pytest.mark.parametrize("passes", [1, 2])
def test_legacy_optimizers_of_keras_2(rank, size, passes):
    legacy = keras.optimizers.legacy
    wanted = fit(compiled(legacy.Adam(0.01)), batches(size), rows=ROWS * size)
    optimizer = hvd_keras.DistributedOptimizer(
        legacy.Adam(0.01), backward_passes_per_step=passes, average_aggregated_gradients=True
    )
    model = compiled(optimizer)
    broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    trained = fit(model, part(batches(size), rank, passes), [broadcast], rows=ROWS // passes)
    if passes == 1:
        assert_equal(trained, wanted, 1e-5)
    assert_same_on_all_ranks(trained)
    assert int(optimizer.iterations) == passes * STEPS


def test_metrics_are_averages_of_the_ranks(rank, size):
    logs = {"loss": rank + 1.0, "accuracy": 0.5, "text": "kept"}
    hvd_keras.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": pytest.approx(np.mean(np.arange(size) + 1)), "accuracy": 0.5, "text": "kept"}


def test_metrics_of_every_kind_of_number_are_averages(rank, size):
    mean = np.mean(np.arange(size))
    logs = {"32": np.float32(rank), "tensor": tf.constant(rank + 1.0), "array": np.array([[rank, 2.0]]), "none": None}
    hvd_keras.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    array = logs.pop("array")
    assert array.shape == (1, 2) and array.tolist() == [[mean, 2.0]]
    assert logs == {"32": mean, "tensor": mean + 1.0, "none": None} and type(logs["32"]) is float


def test_learning_rates(rank, size):
    rates = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(round(float(self.model.optimizer.learning_rate), 6))

    model = compiled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.9)))
    x, y = np.zeros((ROWS * 4, 5), np.float32), np.zeros(ROWS * 4, int)
    callbacks = [
        hvd_keras.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2),
        hvd_keras.callbacks.LearningRateScheduleCallback(0.8, multiplier=0.1, start_epoch=2),  # decays exponentially
        Note(),
    ]
    history = model.fit(x, y, batch_size=ROWS, epochs=4, verbose=0, callbacks=callbacks).history
    warm = [0.8 / size * ((e + (b + 1) / 4) * (size - 1) / 2 + 1) for e in range(2) for b in range(4)]
    assert rates == pytest.approx(warm + [0.8] * 4 + [0.08] * 4, rel=1e-5) and history["lr"][-1] == pytest.approx(0.08)


@pytest.mark.parametrize("legacy", [False] if KERAS_3 else [False, True])
def test_a_rate_that_was_lowered_is_broadcast_and_kept_by_elastic_states(legacy, rank):
    """A host that joins, or one that has not loaded the root's file, has the rate that its script began with."""
    kind = keras.optimizers.legacy.SGD if legacy else keras.optimizers.SGD
    model = compiled(hvd_keras.DistributedOptimizer(kind(0.5 / (rank + 1))))
    fit(model, part(batches(1), 0), [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
    rate = model.optimizer.learning_rate
    assert float(rate) == 0.5
    state = hvd_keras.elastic.KerasState(model, epoch=0)
    state.commit()
    rate.assign(0.125)
    state.restore()
    assert float(rate) == 0.5
    rate.assign(0.25 * (rank + 1))
    state.sync()
    assert float(rate) == 0.25


def test_epochs_are_counted_over_fits_however_they_count(rank):
    state = hvd_keras.elastic.KerasState(compiled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))), epoch=4)
    x, y = np.zeros((ROWS, 5), np.float32), np.zeros(ROWS, int)
    epochs = hvd_keras.elastic.UpdateEpochStateCallback(state)
    state.model.fit(x, y, epochs=6, initial_epoch=state.epoch, verbose=0, callbacks=[epochs])
    assert state.epoch == 6
    state.model.fit(x, y, epochs=2, verbose=0, callbacks=[epochs])
    assert state.epoch == 8


def test_batch_normalisation_over_all_ranks(rank, size):
    random = np.random.default_rng(5)
    x = random.standard_normal((size * 6, 4, 3)).astype(np.float32) * 3 + 1
    counts = [6 + (-1) ** r for r in range(size)]  # 7, 5, ...
    mine = x[sum(counts[:rank]) :][: counts[rank]]
    weights = random.standard_normal(x.shape).astype(np.float32)

    def outcome(layer, x, weights):
        x = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y * weights)
        return y.numpy(), tape.gradient(loss, x).numpy(), layer.moving_mean.numpy(), layer.moving_variance.numpy()

    start = sum(counts[:rank])
    y, grad, mean, variance = outcome(
        keras.layers.BatchNormalization(**({} if KERAS_3 else {"fused": False})), x, weights
    )
    ours = outcome(hvd.SyncBatchNormalization(), mine, weights[start:][: counts[rank]])
    for a, b in zip(ours, (y[start:][: counts[rank]], grad[start:][: counts[rank]], mean, variance), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_model_is_saved_and_loaded_with_its_optimizer(rank, size, tmp_path):
    model = compiled(hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    fit(model, part(batches(size), rank))
    model.save(tmp_path / "model.keras")
    again = hvd_keras.load_model(tmp_path / "model.keras")
    assert "Distributed" in [kind.__name__ for kind in type(again.optimizer).__mro__]
    assert int(again.optimizer.iterations) == STEPS
    assert_equal(fit(again, part(batches(size), rank)), fit(model, part(batches(size), rank)), 1e-6)
    assert keras.models.load_model(tmp_path / "model.keras").optimizer.__class__ is keras.optimizers.Adam


def test_local_variables_of_an_optimizer_stay_on_their_rank(rank, size):
    shared, own = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(own)
    optimizer.apply_gradients([(tf.constant(rank + 1.0), shared), (tf.constant(rank + 1.0), own)])
    assert float(shared) == pytest.approx(1 - np.mean(np.arange(size) + 1)) and float(own) == 1 - (rank + 1) / size


def test_local_variables_keep_their_values_in_a_broadcast(rank, size):
    model = compiled(keras.optimizers.SGD(0.1))
    kernel, bias = model.layers[0].weights
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=bias.value if KERAS_3 else bias)
    callback.register_local_var(kernel)
    callback.set_model(model)
    model.set_weights([np.full(w.shape, float(rank)) for w in model.get_weights()])
    callback.on_train_begin()
    assert [float(np.max(w)) for w in model.get_weights()] == [rank, rank, 0, 0]


@pytest.mark.parametrize("average", [False, True])
def test_several_passes_with_an_optimizer_of_tensorflow_1(rank, size, average):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        shared, own = (v1.get_variable(name, initializer=tf.ones([2])) for name in ("shared", "own"))
        steps = v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(
            v1.train.MomentumOptimizer(1.0, 0.0), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        optimizer.register_local_var(own)
        factor = v1.placeholder(tf.float32, [])
        train = optimizer.minimize(tf.reduce_sum((shared + own) * factor), global_step=steps)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for done in range(4):
            session.run(train, {factor: rank + 1.0})
            sums = 2.0 * ((done + 1) // 2) / (2 if average else 1)
            want = [1 - sums * np.mean(np.arange(size) + 1)] * 2, [1 - sums * (rank + 1) / size] * 2
            np.testing.assert_allclose(session.run([shared, own]), want, rtol=1e-6)
        assert session.run(steps) == 4


def test_gradients_are_added_up_by_horovods_arguments(rank, size):
    shared, own = tf.Variable(1.0), tf.Variable(1.0)
    helper = hvd.LocalGradientAggregationHelper(
        backward_passes_per_step=1,
        allreduce_func=lambda grads, variables: [hvd.allreduce(g, op=hvd.Sum) for g in grads],
        sparse_as_dense=False,
        average_aggregated_gradients=True,
        rank=rank,
        optimizer_type="optimizer_type_keras",
        process_set=hvd.global_process_set,
        scale_local_gradients=True,
        name="helper",
    )
    helper.register_local_var(own)
    grads = helper.compute_gradients([tf.constant(1.0), None, tf.constant(2.0)], [shared, tf.Variable(0.0), own])
    assert [g if g is None else float(g) for g in grads] == [size, None, 2 / size]


def test_arguments_of_horovod(rank, size, tmp_path):
    assert hvd.broadcast_object(rank, 1, None, "object") == 1
    assert hvd.allgather_object(rank, None, "objects") == list(range(size))
    assert hvd.broadcast_object_fn(1)(rank) == 1
    with tf.GradientTape(persistent=True) as tape:
        variables = [tf.Variable(1.0), tf.Variable(2.0)]
        loss = tf.add_n(variables) * (rank + 1.0)
    tape = hvd.DistributedGradientTape(tape)
    mean = np.mean(np.arange(size) + 1)
    assert [float(g) for g in tape.gradient(loss, variables, use_generic_names=True)] == [mean, mean]
    tape.register_local_source(variables[1])
    ((own, grad),), ((shared, mean_grad),) = tape.get_local_and_global_gradients(loss, variables)
    assert own is variables[1] and shared is variables[0]
    assert float(grad) == (rank + 1) / size and float(mean_grad) == mean
    (rows,) = hvd.grouped_reducescatter(
        [tf.ones([size, 1])], "", hvd.Compression.none, hvd.Sum, hvd.global_process_set, 10.0, 0.5
    )
    assert rows.numpy().tolist() == [[5.0 * size]]
    # Keras 2.13 and 2.14 save no checkpoint in their own format: their callback gives it options that it refuses.
    path = tmp_path / f"{rank}.{'h5' if tf.__version__.startswith(('2.13.', '2.14.')) else 'keras'}"
    best = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss", save_freq="epoch")
    best.filepath = str(path)
    model = compiled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    fit(model, batches(size)[:1], [best])
    assert_equal(hvd_keras.load_model(path, legacy_opts=False).get_weights(), model.get_weights())
    assert hvd_keras.callbacks.BestModelCheckpoint(filepath=str(path)).filepath == str(path)
    assert hvd_keras.callbacks.BestModelCheckpoint("loss", 0, True).save_weights_only
    best = hvd_keras.callbacks.BestModelCheckpoint("accuracy", 0, False, "max", 7)
    assert (best.save_weights_only, best.save_freq, best.filepath) == (False, 7, "")
    assert best.mode == "max" if hasattr(best, "mode") else best.monitor_op is np.greater  # newer Keras, older
    hvd.SyncBatchNormalization(fused=False)
    with pytest.raises(ValueError, match="does not support fused=True"):
        hvd.SyncBatchNormalization(fused=True)
    if KERAS_3:
        assert list(model.optimizer.variables()) == list(model.optimizer.variables) != []


def test_wrong_arguments():
    adam = hvd_keras.DistributedOptimizer(keras.optimizers.Adam())
    kind = keras.optimizers.LossScaleOptimizer if KERAS_3 else keras.mixed_precision.LossScaleOptimizer
    for wrapped in adam, kind(adam):
        with pytest.raises(ValueError, match="already"):
            hvd_keras.DistributedOptimizer(wrapped)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match=r"wraps a tf\.GradientTape, not str"):
        hvd.DistributedGradientTape("tape")
    with pytest.raises(ValueError, match="optimizer of Keras"):
        hvd_keras.DistributedOptimizer("adam")
    v1, v = tf.compat.v1.train.GradientDescentOptimizer(0.1), tf.Variable(1.0)
    wraps = (
        lambda **options: hvd.DistributedGradientTape(tf.GradientTape(), **options),
        lambda **options: hvd.DistributedOptimizer(v1, **options),
        lambda **options: hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), **options),
    )
    for wrap in wraps:
        for wrong in ({"num_groups": -1}, {"groups": "x"}, {"groups": 0}, {"groups": [v]}, {"groups": 1.5}):
            with pytest.raises(ValueError, match="groups must be a positive number or a list of lists of variables"):
                wrap(**wrong)
        with pytest.raises(ValueError, match="groups must consist of variables"):
            wrap(groups=[[3]])
        with pytest.raises(ValueError, match="only once in groups"):
            wrap(groups=[[v], [v]])
        for nobody in (5, None):
            with pytest.raises(ValueError, match=f"process_set={nobody}: give a ProcessSet"):
                wrap(process_set=nobody)
        with pytest.raises(ValueError, match="compression='int8': Adasum combines whole steps"):
            wrap(op=hvd.Adasum, compression="int8")
        for right in ({"num_groups": 2}, {"groups": [[v]]}, {"groups": ((v,),)}, {"groups": 1}, {}):
            wrap(**right)
    for nobody in (5, None):
        with pytest.raises(ValueError, match=f"process_set={nobody}: give a ProcessSet"):
            hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), process_set=nobody, sync="ssp:1")
    for wrap in wraps[1:]:
        for passes in 1.5, 1.0:
            with pytest.raises(ValueError, match=f"backward_passes_per_step={passes}: at least 1"):
                wrap(backward_passes_per_step=passes)
