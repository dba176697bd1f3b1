"""Models: shapes, published sizes, gradients with and without checkpoints."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vmem_jax.models import (
    VGG,
    ResNet,
    build_network,
    cross_entropy,
    job,
    resnet_blocks,
    vgg_stages,
)
from vmem_jax.models.initialisers import drawn_in_float32, padding_aware_he
from vmem_jax.models.scanned_resnet import loops_of


def _size(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _step_shapes(the_job):
    return jax.eval_shape(the_job.step, the_job.state_shapes(), the_job.batch)


def _filled(shapes):
    """Random variables without compiling an initialiser for each shape."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(0.3, 0.3, leaf.shape).astype("float32"), shapes)


def _remats(function, *args):
    equations = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return sum("policy" in equation.params for equation in equations)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vgg16", 138_357_544),
        ("vgg19", 143_667_240),
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("alexnet", 61_100_840),
        ("overfeat", 145_920_872),
        ("googlenet", 6_998_552),
        ("inception4", 42_679_816),
        ("mobilenet2", 3_504_872),
        ("swint", 28_288_354),
        ("swinb", 87_768_224),
        ("densenet40", 1_019_722),
        ("gpt12", 124_439_808),
        ("vit24w1024", 304_324_584),  # 304,326,632 with a class token and its position
    ],
)
def test_parameter_counts_are_the_published_ones(name, parameters):
    assert _size(job(name, batch=2).state_shapes().params) == parameters


def test_resnet1001_has_the_published_size():
    state = job("resnet1001", batch=4, image=32, classes=10).state_shapes()
    assert _size(state.params) == pytest.approx(10.2e6, rel=0.02)
    convs = sum(name.startswith("conv") for block in state.params.values() for name in block)
    assert convs == 999  # with the stem and the classifier 1,001


@pytest.mark.parametrize(
    ("depth", "convs"),
    [
        (16, (2, 2, 3, 3, 3)),
        (19, (2, 2, 4, 4, 4)),
        (101, (19, 19, 20, 20, 20)),
        (116, (22, 22, 23, 23, 23)),
        (416, (82, 82, 83, 83, 83)),
    ],
)
def test_vgg_stages(depth, convs):
    stages = vgg_stages(depth)
    assert stages == tuple(zip((64, 128, 256, 512, 512), convs, strict=True))
    assert sum(convs) + 3 == depth


def test_resnet_blocks():
    assert resnet_blocks(50) == ((3, 4, 6, 3), True, False)
    assert resnet_blocks(18) == ((2, 2, 2, 2), False, False)
    assert resnet_blocks(1001) == ((111, 111, 111), True, True)
    assert resnet_blocks(164) == ((18, 18, 18), True, True)
    deep = build_network("resnet6-32-596-6", batch=16).model  # SuperNeurons, Table 4
    assert deep.blocks == (6, 32, 596, 6) and deep.bottleneck and 3 * sum(deep.blocks) + 2 == 1922
    assert build_network("resnet3-4-6-3", batch=16) == build_network("resnet50", batch=16)


@pytest.mark.parametrize("depth", [-4, 0, 10, 17, 52, 417, 1000])
def test_other_depths_are_refused(depth):
    with pytest.raises(ValueError, match=r"19 or 16 \+ 5k"):
        vgg_stages(depth)
    with pytest.raises(ValueError, match=r"18, 34, 50, 101, 152 .* 9n \+ 2"):
        resnet_blocks(depth)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lenet", {}, "no model 'lenet'. There are, for instance, vgg16, resnet50, alexnet"),
        ("vgg", {}, "no model"),
        ("densenet41", {}, "3n \\+ 4"),
        ("gpt2w100", {}, "multiple of 64, not 100"),
        ("alexnet", {"head_width": 64}, "head_width"),
        ("vgg17", {}, "VGG-17"),
        ("resnet50", {"head_width": 64}, "head_width"),
        ("resnet50", {"wrap": "scan"}, "wrap"),
        ("resnet50", {"optimizer": "lion"}, "optimizer"),
        ("resnet50", {"image": 0}, "image"),
    ],
)
def test_job_refuses(name, options, message):
    with pytest.raises(ValueError, match=message):
        job(name, batch=2, **options)


def test_vgg_refuses_images_too_small_to_pool():
    with pytest.raises(ValueError, match="32x32"):
        job("vgg16", batch=2, image=16).state_shapes()


@pytest.mark.parametrize(("name", "image"), [("vgg116", 224), ("resnet29", 32)])
def test_deep_steps_have_shapes(name, image):
    deep = job(name, batch=4, image=image, optimizer="momentum")
    state, metrics = _step_shapes(deep)
    assert state == deep.state_shapes()
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "optimizer"), [("vgg16", "sgd"), ("resnet18", "momentum"), ("resnet11", "adamw")]
)
def test_types(name, optimizer):
    plain = job(name, batch=2, image=32, optimizer=optimizer)
    state, metrics = _step_shapes(plain)
    assert state == plain.state_shapes()  # so that it can be donated
    for path, leaf in jax.tree.leaves_with_path(state.params):
        norm = "norm" in jax.tree_util.keystr(path)
        assert leaf.dtype == (jnp.float32 if norm else jnp.bfloat16), path
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.batch_stats))
    assert {leaf.dtype for leaf in metrics.values()} == {jnp.dtype("float32")}

    master = job(name, batch=2, image=32, optimizer=optimizer, param_dtype="float32")
    state, _ = _step_shapes(master)
    assert state == master.state_shapes()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    model = build_network(name, batch=2, image=32, param_dtype="float32").model
    text = str(
        jax.make_jaxpr(lambda s, x: cross_entropy(model, s.params, s.batch_stats, x)[0])(
            state, master.batch
        )
    )
    assert "bf16[" in text


def test_logits_and_random_batch():
    small = job("resnet11", batch=3, image=16, classes=7)
    images, labels = small.random_batch(jax.random.key(1))
    assert images.shape == (3, 16, 16, 3) and images.dtype == jnp.float32
    assert labels.shape == (3,) and labels.dtype == jnp.int32 and int(labels.max()) < 7
    state = small.state_shapes()
    model = build_network("resnet11", batch=3, image=16, classes=7).model
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = jax.eval_shape(lambda v, x: model.apply(v, x, train=False), variables, images)
    assert logits.shape == (3, 7) and logits.dtype == jnp.float32


def test_stem_follows_the_image_size():
    for image, size in [(224, 7), (64, 3)]:
        params = job("resnet50", batch=2, image=image).state_shapes().params
        assert params["stem_conv"]["kernel"].shape == (size, size, 3, 64)
        assert "conv3" in params["stage1_block2"]


_SMALL_RESNET = {"blocks": (1, 1), "classes": 5, "width": 8}


@pytest.mark.parametrize(
    ("model", "wrapped_layers"),
    [
        (VGG(((8, 2), (16, 1)), classes=5, head_width=16), 3),
        (ResNet(bottleneck=False, **_SMALL_RESNET), 2),
        (ResNet(bottleneck=True, preactivation=True, cifar_stem=True, **_SMALL_RESNET), 2),
    ],
)
def test_checkpoint_gives_the_same_loss_and_gradients(model, wrapped_layers):
    images = jax.random.normal(jax.random.key(0), (4, 16, 16, 3))
    batch = (images, jnp.arange(4, dtype=jnp.int32))
    shapes = jax.eval_shape(model.init, jax.random.key(1), images)
    variables = _filled(shapes)
    results = []
    for checkpoint in (False, True):
        candidate = model.clone(checkpoint=checkpoint)
        assert jax.eval_shape(candidate.init, jax.random.key(1), images) == shapes

        def loss(params, candidate=candidate):
            return cross_entropy(candidate, params, variables.get("batch_stats", {}), batch)

        assert _remats(loss, variables["params"]) == (wrapped_layers if checkpoint else 0)
        results.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"]))
    flat = [jax.tree.leaves_with_path(result) for result in results]
    assert len(flat[0]) > len(jax.tree.leaves(variables["params"]))
    for (path, plain), (_, checkpointed) in zip(*flat, strict=True):
        scale = float(jnp.abs(plain).max()) + 1e-6
        np.testing.assert_allclose(
            checkpointed / scale, plain / scale, atol=1e-4, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize(
    ("name", "image", "count"),
    [
        ("vgg16", 32, 13),
        ("resnet50", 32, 16),
        ("googlenet", 32, 9),
        ("fcn", 32, 15),
        ("gpt3w128", 32, 3),
        ("vit3w128", 32, 3),
        ("mobilenet2", 32, 17),
        ("swint", 224, 12),
    ],
)
def test_job_wraps_each_layer_or_block(name, image, count):
    options = {"tokens": 16} if name.startswith("gpt") else {}
    plain = job(name, batch=2, image=image, **options)
    wrapped = job(name, batch=2, image=image, wrap="checkpoint", **options)
    assert plain.state_shapes() == wrapped.state_shapes()
    state = plain.state_shapes()
    model = build_network(name, batch=2, image=image, wrap="checkpoint", **options).model
    key = jax.random.key(0)
    loss = lambda s, x: cross_entropy(model, s.params, s.batch_stats, x, key=key)
    assert _remats(loss, state, plain.batch) == count


def test_job_offloads_the_inputs_of_layers_by_jaxs_own_means():
    work = job("vgg16", batch=2, image=32, head_width=64, wrap="offload")
    assert work.state_shapes() == job("vgg16", batch=2, image=32, head_width=64).state_shapes()
    text = str(jax.make_jaxpr(work.step)(work.state_shapes(), work.batch))
    assert text.count("name=layer_input") == 16  # thirteen convolutions, three fully connected
    assert text.count("MemorySpace.Host") == 16


@pytest.mark.parametrize(
    ("name", "options", "logits"),
    [
        ("overfeat", {"image": 231, "classes": 5}, (2, 5)),
        ("googlenet", {"image": 32, "classes": 5}, (2, 5)),
        ("densenet40k40", {}, (2, 10)),
        ("fcn", {"image": 64}, (2, 64, 64, 21)),
        ("gpt2w128", {"tokens": 16, "classes": 11}, (2, 16, 11)),
        ("vit2w128", {"image": 32, "classes": 5}, (2, 5)),
        ("mobilenet2", {"image": 32, "classes": 5}, (2, 5)),
        ("swint", {"classes": 5}, (2, 5)),
    ],
)
def test_networks(name, options, logits):
    """Logits for every label, random batches of what they take, and a step that keeps its state."""
    network = build_network(name, batch=2, **options)
    assert (*network.labels.shape, network.classes) == logits
    work = job(name, batch=2, optimizer="adamw", **options)
    state, metrics = _step_shapes(work)
    assert state == work.state_shapes() and metrics["loss"].dtype == jnp.float32
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    apply = lambda v, x: network.model.apply(v, x, train=False)
    assert jax.eval_shape(apply, variables, network.inputs).shape == logits
    inputs, labels = jax.eval_shape(work.random_batch, jax.random.key(0))
    assert (inputs.shape, inputs.dtype) == (network.inputs.shape, network.inputs.dtype)
    assert (labels.shape, labels.dtype) == (network.labels.shape, network.labels.dtype)


@pytest.mark.parametrize("name", ["alexnet", "overfeat"])
def test_images_of_which_nothing_is_left_are_refused(name):
    with pytest.raises(ValueError, match="too small for this network"):
        job(name, batch=2, image=32).state_shapes()


def test_fcn_refuses_images_that_do_not_halve_five_times():
    with pytest.raises(ValueError, match=r"multiples of 32 pixels, not \(48, 48\)"):
        job("fcn", batch=2, image=48).state_shapes()


def test_a_transformer_drops_others_at_each_step_and_sees_no_later_token():
    work = job("gpt1w64", batch=2, tokens=8, classes=7, dtype="float32")
    state = jax.jit(work.init)(jax.random.key(0))
    batch = work.random_batch(jax.random.key(1))
    loss = lambda state: step(state, batch)[1]["loss"]
    step = jax.jit(work.step)
    first = loss(state)
    assert first == loss(state) != loss(state.replace(count=state.count + 1))
    assert 0.5 * math.log(7) < first < 2 * math.log(7)
    model = build_network("gpt1w64", batch=2, tokens=8, classes=7, dtype="float32").model
    tokens = batch[0]
    apply = jax.jit(lambda x: model.apply({"params": state.params}, x, train=False))
    logits = [apply(x) for x in (tokens, tokens.at[:, 5:].set(0))]
    np.testing.assert_allclose(logits[0][:, :5], logits[1][:, :5], rtol=1e-5, atol=1e-6)


def test_116_layers_start_alive_in_bfloat16():
    # VGG-116 with fewer channels. Eager, as that compiles each shape of layer once.
    stages = tuple((32, convs) for _, convs in vgg_stages(116))
    model = VGG(stages, 10, head_width=64, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("float32")
    params = model.init(jax.random.key(0, impl="rbg"), images)["params"]
    value, grads = jax.value_and_grad(
        lambda params: cross_entropy(model, params, {}, (images, np.array([3, 7])))[0]
    )(params)
    assert 0.1 < value < 100
    for path, leaf in jax.tree.leaves_with_path(grads):
        norm = np.linalg.norm(np.asarray(leaf, np.float32))
        assert 1e-4 < norm < 1e4, (jax.tree_util.keystr(path), norm)


@pytest.mark.parametrize("side", [1, 2, 7])
def test_padding_aware_he_keeps_the_second_moment(side):
    x = jax.random.normal(jax.random.key(0), (4, side, side, 64))
    for key in jax.random.split(jax.random.key(1), 40):
        kernel = padding_aware_he(side, side)(key, (3, 3, 64, 64))
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
    assert 0.02 < float(jnp.mean(x**2)) < 50  # a random walk; without the correction 1e-14 at 2x2


def test_bfloat16_draws_have_no_bias():
    he = drawn_in_float32(jax.nn.initializers.he_normal())
    kernel = he(jax.random.key(0), (512, 2048), jnp.bfloat16)
    assert kernel.dtype == jnp.bfloat16
    kernel = kernel.astype(jnp.float32) * (512 / 2) ** 0.5
    assert abs(float(kernel.mean())) < 0.004 and abs(float(kernel.std()) - 1) < 0.01


def test_dropout_only_drops_in_training():
    model = VGG(((4, 1),), classes=3, head_width=64, dropout=0.5)
    images = jax.random.normal(jax.random.key(0), (2, 4, 4, 3))
    shapes = jax.eval_shape(partial(model.init, train=False), jax.random.key(1), images)
    variables = _filled(shapes)
    first, second = (
        model.apply(variables, images, rngs={"dropout": jax.random.key(seed)}) for seed in (2, 3)
    )
    assert not np.allclose(first, second)
    assert model.apply(variables, images, train=False).shape == (2, 3)


@pytest.mark.parametrize(
    ("blocks", "loops"), [(5, (0, 0, 5)), (595, (35, 17, 0)), (2455, (57, 43, 4)), (64, (0, 0, 64))]
)
def test_long_stages_are_loops_of_about_the_square_root(blocks, loops):
    outer, inner, rest = loops_of(blocks, 64)
    assert (outer, inner, rest) == loops and outer * inner + rest == blocks


def _unrolled(scanned, blocks, most):
    """The variables of `ScannedResNet` as `ResNet` has them."""

    def in_flax(path, a):
        return a.transpose(1, 2, 3, 0) if path[-1].key == "kernel" and a.ndim == 4 else a

    found = {}
    for collection, tree in scanned.items():
        own = {name: part for name, part in tree.items() if "loop" not in name}
        for stage, count in enumerate(blocks, start=1):
            outer, inner, rest = loops_of(count - 1, most)
            places = [("loops", (i, j)) for i in range(outer) for j in range(inner)]
            places += [("loop", (i,)) for i in range(rest)]
            for index, (name, at) in enumerate(places, start=2):
                part = tree[f"stage{stage}_{name}"]["block"]
                own[f"stage{stage}_block{index}"] = jax.tree.map(lambda a, at=at: a[at], part)
        found[collection] = jax.tree_util.tree_map_with_path(in_flax, own)
    return found


def test_a_scanned_resnet_computes_what_the_unrolled_one_does():
    blocks, most = (1, 6, 1, 1), 2
    options = {"batch": 2, "image": 16, "classes": 5, "dtype": "float32"}
    unrolled = build_network("resnet1-6-1-1", **options).model.clone(width=4)
    scanned = build_network("resnet1-6-1-1-scan", **options).model.clone(width=4, most=most)
    images = np.random.default_rng(1).normal(size=(2, 16, 16, 3)).astype("float32")
    shapes = jax.eval_shape(partial(scanned.init, train=False), jax.random.key(0), images)
    variables = _filled(shapes)
    same = _unrolled(variables, blocks, most)
    expected = jax.eval_shape(partial(unrolled.init, train=False), jax.random.key(0), images)
    assert jax.tree.map(jnp.shape, same) == jax.tree.map(jnp.shape, expected)

    def gradients(model, variables):
        apply = lambda params: model.apply(
            {**variables, "params": params}, images, mutable=["batch_stats"]
        )[0]
        step = jax.jit(jax.value_and_grad(lambda params: jnp.square(apply(params)).mean()))
        lowered = step.lower(variables["params"])
        options = {"xla_backend_optimization_level": 0}
        return lowered.compile(options)(variables["params"])

    loss, grads = gradients(scanned, variables)
    other, others = gradients(unrolled, same)
    np.testing.assert_allclose(loss, other, rtol=1e-4)
    ours = _unrolled({"params": grads}, blocks, most)["params"]
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3 * np.abs(b).max())
