"""The programs: where they are published, and how they are edited and run."""

from typing import NamedTuple


class Program(NamedTuple):
    """A training of a public repository.

    Attributes:
      name: Its name on the page.
      kind: Its library, model and trainer.
      repository: The repository on GitHub, `owner/name`.
      commit: The commit.
      file: The file, a script or a notebook.
      float16: The edits for float16, as `edits` reads them.
      run: Code that runs after the program, in its module, and starts the training.
      setting: Edits for both dtypes: data, sizes, and a call of `record(loss, opt_state)`
        in each step.
      mocks: Libraries that only load or draw data, and are not installed.
      is_package: Whether it imports the modules beside it by their whole paths.
      measure: The number that is recorded.
      note: A sentence about the edits or the losses.
    """

    name: str
    kind: str
    repository: str
    commit: str
    file: str
    float16: str
    run: str = ""
    setting: str = ""
    mocks: tuple[str, ...] = ()
    is_package: bool = False
    measure: str = "loss"
    note: str = ""


FLAX = "google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0"
EQUINOX = "patrick-kidger/equinox", "9336d820b2ef66b360fc6cb3611b3da5cefbb14d"
HAIKU = "google-deepmind/dm-haiku", "f4d858a5cbb29140855d68f81f5fd625e078a5ae"
TENSORFLOW = "tensorflow", "tensorflow_datasets", "tensorboard", "orbax.export"

CNN = Program(
    "CNN",
    "Flax nnx, `nnx.Optimizer`: convolutions and BatchNorm",
    *FLAX,
    "examples/mnist/train.py",
    """
 import optax
+from optax_lossscale import LossScaleOptimizer, autocast

-  grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
+  grad_fn = optimizer.tx.value_and_grad(autocast(loss_fn), optimizer.opt_state, has_aux=True)

-      model, optax.sgd(learning_rate, momentum), wrt=nnx.Param
+      model, LossScaleOptimizer(optax.sgd(learning_rate, momentum)), wrt=nnx.Param
""",
    """
from benchmarks.public.data import Batches, batches, digits

def get_datasets(config):
  images, labels = digits(28)
  cut = batches(config.batch_size, images[..., None], labels)
  return Batches({'image': x, 'label': y} for x, y in cut), Batches()

config = {'learning_rate': 0.1, 'momentum': 0.9, 'batch_size': 64, 'num_epochs': 4}
train_and_evaluate(ml_collections.ConfigDict(config), '.')
""",
    """
   metrics.update(loss=loss, logits=logits, labels=batch['label'])  # In-place updates.
   optimizer.update(model, grads)  # In-place updates.
+  record(loss, optimizer.opt_state)
""",
    TENSORFLOW,
)

VAE = Program(
    "VAE",
    "Flax linen, `TrainState`: a variational autoencoder, not compiled",
    *FLAX,
    "examples/vae/train.py",
    """
 import optax
+from optax_lossscale import LossScaleOptimizer, autocast

-  grads = jax.grad(loss_fn)(state.params)
+  _, grads = state.tx.value_and_grad(autocast(loss_fn), state.opt_state)(state.params)

-      tx=optax.adam(config.learning_rate),
+      tx=LossScaleOptimizer(optax.adam(config.learning_rate)),
""",
    """
from benchmarks.public.data import batches, digits

images = jnp.round(digits(28)[0].reshape(-1, 784))
cut = batches(128, images)
train_ds = (x for _ in range(10) for x, in cut)
input_pipeline.build_train_set = lambda *_: train_ds
input_pipeline.build_test_set = lambda *_: images[:64]
tfds.builder().info.splits['train'].num_examples.__floordiv__.return_value = 100
config = {'learning_rate': 1e-3, 'latents': 20, 'batch_size': 128, 'num_epochs': 1}
train_and_evaluate(ml_collections.ConfigDict(config), '.')
""",
    """
     loss = bce_loss + kld_loss
+    record(loss)

       state = train_step(state, batch, key, config.latents)
+      record(state=state.opt_state)
""",
    TENSORFLOW,
)

PPO = Program(
    "PPO",
    "Flax linen, `TrainState`: reinforcement learning inside `lax.scan`",
    "luchris429/purejaxrl",
    "31756b197773a52db763fdbe6d635e4b46522a73",
    "purejaxrl/ppo.py",
    """
 import optax
+from optax_lossscale import LossScaleOptimizer, autocast

-                    grad_fn = jax.value_and_grad(_loss_fn, has_aux=True)
+                    grad_fn = train_state.tx.value_and_grad(autocast(_loss_fn), train_state.opt_state, has_aux=True)

-            tx=tx,
+            tx=LossScaleOptimizer(tx),
""",
    """
config = {
    "LR": 2.5e-4, "NUM_ENVS": 4, "NUM_STEPS": 128, "TOTAL_TIMESTEPS": 1e5,
    "UPDATE_EPOCHS": 4, "NUM_MINIBATCHES": 4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1", "ANNEAL_LR": True, "DEBUG": False,
}
out = jax.jit(make_train(config))(jax.random.PRNGKey(30))
for returns in out["metrics"]["returned_episode_returns"]:
    record(returns.mean())
""",
    """
                     train_state = train_state.apply_gradients(grads=grads)
+                    record(state=train_state.opt_state)
""",
    ("brax", "navix"),
    measure="mean return of an episode",
    note="A return is better if it is higher. Steps are updates, of 16 gradient steps each.",
)

DIFFUSION = Program(
    "Diffusion",
    "Equinox: a score-based diffusion model, an MLP mixer",
    *EQUINOX,
    "docs/examples/score_based_diffusion.ipynb",
    """
 import optax  # https://github.com/deepmind/optax
+from optax_lossscale import LossScaleOptimizer, autocast

-    loss_fn = eqx.filter_value_and_grad(batch_loss_fn)
-    loss, grads = loss_fn(model, weight, int_beta, data, t1, key)
-    updates, opt_state = opt_update(grads, opt_state)
-    model = eqx.apply_updates(model, updates)
+    model, opt_state, loss = opt_update(autocast(batch_loss_fn), model, opt_state, weight, int_beta, data, t1, key)

-    opt = optax.adabelief(lr)
+    opt = LossScaleOptimizer(optax.adabelief(lr))

-            model, weight, int_beta, data, t1, train_key, opt_state, opt.update
+            model, weight, int_beta, data, t1, train_key, opt_state, opt.minimize
""",
    """
from benchmarks.public.data import digits

def mnist():
    return jnp.uint8(255 * digits(28)[0][:, None])

main(num_steps=100, batch_size=64, sample_size=1)
""",
    """
     key = jr.split(key, 1)[0]
+    record(loss, opt_state)

-main()
""",
    note="The program passes `opt.update` to its step, so `opt.minimize` takes its place.",
)

GAN = Program(
    "GAN",
    "Equinox: convolutions and BatchNorm, two models and optimizers",
    *EQUINOX,
    "docs/examples/deep_convolutional_gan.ipynb",
    """
 import optax
+from optax_lossscale import LossScaleOptimizer, autocast

-@eqx.filter_value_and_grad(has_aux=True)
+@autocast
 def compute_grads_discriminator(

-@eqx.filter_value_and_grad(has_aux=True)
+@autocast
 def compute_grads_generator(

-    ) = compute_grads_discriminator(
+    ) = discriminator_optimizer.value_and_grad(compute_grads_discriminator, discriminator_opt_state, has_aux=True)(

-    ) = compute_grads_generator(
+    ) = generator_optimizer.value_and_grad(compute_grads_generator, generator_opt_state, has_aux=True)(

-generator_optimizer = optax.adam(lr, b1=beta1, b2=beta2)
-discriminator_optimizer = optax.adam(lr, b1=beta1, b2=beta2)
+generator_optimizer = LossScaleOptimizer(optax.adam(lr, b1=beta1, b2=beta2))
+discriminator_optimizer = LossScaleOptimizer(optax.adam(lr, b1=beta1, b2=beta2))
""",
    """
assert jnp.isfinite(generated_images).all()
""",
    """
-import torch
-import torchvision
-import torchvision.transforms as transforms
+from unittest import mock
+torch = torchvision = transforms = mock.MagicMock()

-batch_size = 32
-num_steps = 100000
+batch_size = 8
+num_steps = 20

-images, labels = next(iter(dataloader))
+from benchmarks.public.data import digits, tensors
+dataloader = tensors(batch_size, 2 * digits(64)[0][:, None] - 1, digits(64)[1])
+images, labels = next(iter(dataloader))

-generator_opt_state = generator_optimizer.init(eqx.filter(generator, eqx.is_array))
+generator_opt_state = generator_optimizer.init(eqx.filter(generator, eqx.is_inexact_array))
 discriminator_opt_state = discriminator_optimizer.init(
-    eqx.filter(discriminator, eqx.is_array)
+    eqx.filter(discriminator, eqx.is_inexact_array)

-noise = jr.normal(subkey, (1000, latent_size, 1, 1))
+noise = jr.normal(subkey, (32, latent_size, 1, 1))

         generator_losses.append(generator_loss)
+        record(generator_loss, generator_opt_state)
+        record(state=discriminator_opt_state)
""",
    measure="loss of the generator",
    note="As published it fails with this Optax, in float32 as well: its optimizers begin "
    "with `eqx.is_array`. Here they begin with `eqx.is_inexact_array`.",
)

LATENT_ODE = Program(
    "Latent ODE",
    "Equinox and Diffrax: a GRU, and a solver of differential equations",
    "patrick-kidger/diffrax",
    "5ea5fcb05058bd22548300a10ea5ef5ce7fb75bb",
    "docs/examples/latent_ode.ipynb",
    """
 import optax
+from optax_lossscale import LossScaleOptimizer, autocast

-    @eqx.filter_value_and_grad
+    @autocast
     def loss(model, ts_i, ys_i, key_i):

-        value, grads = loss(model, ts_i, ys_i, key_i)
+        value, grads = optim.value_and_grad(loss, opt_state)(model, ts_i, ys_i, key_i)

-    optim = optax.adam(lr)
+    optim = LossScaleOptimizer(optax.adam(lr))
""",
    "main(dataset_size=1000, batch_size=64, steps=200, save_every=100)",
    """
         key_i = jr.split(key_i, 1)[0]
         updates, opt_state = optim.update(grads, opt_state)
+        record(value, opt_state)

-main()
""",
    note="`autocast` leaves the solver in float32: floats decide when it ends. Of all programs "
    "this one ends furthest from float32, though `trace_numerics` finds gradients that agree.",
)

LANGUAGE_MODEL = Program(
    "Language model",
    "Haiku: a transformer with dropout, gradients clipped",
    *HAIKU,
    "examples/transformer/train.py",
    """
 import optax
+from optax_lossscale import LossScaleOptimizer, autocast

-  return optax.chain(
+  return LossScaleOptimizer(optax.chain(
       optax.clip_by_global_norm(GRAD_CLIP_VALUE),
       optax.adam(LEARNING_RATE, b1=0.9, b2=0.99),
-  )
+  ))

-  loss_and_grad_fn = jax.value_and_grad(loss_fn.apply)
+  loss_and_grad_fn = optimiser().value_and_grad(autocast(loss_fn.apply), state.opt_state)
""",
    """
import types

from benchmarks.public.data import text

with open('text.txt', 'w') as file:
  file.write(text())
DATASET_PATH = types.SimpleNamespace(value='text.txt')
MAX_STEPS = 200
main(None)
""",
    """
   metrics = {
       'step': state.step,
+      'recorded': record(loss, new_opt_state) or 0.0,
""",
    is_package=True,
)

NANO = Program(
    "NanoLM",
    "Flax linen, Optax alone: a transformer of characters",
    "google-deepmind/optax",
    "2edbcbe2390da13983b92cbef94ac0460ecde1c5",
    "examples/nanolm.ipynb",
    """
 import optax
+from optax_lossscale import LossScaleOptimizer, autocast

-opt = optax.adamw(learning_rate=LEARNING_RATE)
+opt = LossScaleOptimizer(optax.adamw(learning_rate=LEARNING_RATE))

-  loss, grad = jax.value_and_grad(loss_fun)(params, *batch, subkey)
-  updates, opt_state = opt.update(grad, opt_state, params)
-  params = optax.apply_updates(params, updates)
+  params, opt_state, loss = opt.minimize(autocast(loss_fun), params, opt_state, *batch, subkey)
""",
    "",
    """
-BATCH_SIZE = 128  # @param{type:"integer"}
+BATCH_SIZE = 16

-N_ITERATIONS = 50_000  # @param{type:"integer"}
+N_ITERATIONS = 100

-NUM_LAYERS = 6  # @param{type:"integer"}
+NUM_LAYERS = 2

-text_train = ""
+from benchmarks.public.data import text
+text_train = text()

-text_validation = ""
+text_validation = text()

   return params, key, opt_state, loss
-
-
-for i in range(N_ITERATIONS):
+
+for i in range(N_ITERATIONS):

   all_train_losses.append(loss)
+  record(loss, opt_state)

-text = model.generate(key, var_params, 1000)[:, 0, 0].tolist()
-print(decode(text))
""",
    TENSORFLOW,
)

GRAPH = Program(
    "Graph network",
    "Haiku and Jraph: a graph convolution",
    "google-deepmind/jraph",
    "51f5990104f7374492f8f3ea1cbc47feb411c69c",
    "jraph/examples/zacharys_karate_club.py",
    """
 import optax
+from optax_lossscale import LossScaleOptimizer, autocast

-  opt_init, opt_update = optax.adam(1e-2)
+  opt_init, opt_update = optimizer = LossScaleOptimizer(optax.adam(1e-2))

-    g = jax.grad(prediction_loss)(params)
+    _, g = optimizer.value_and_grad(autocast(prediction_loss), opt_state)(params)
""",
    "optimize_club(num_steps=100)",
    """
     params, opt_state = update(params, opt_state)
+    record(prediction_loss(params), opt_state)
""",
    note="An optimizer unpacks as one of Optax does.",
)

VISION = Program(
    "Vision transformer",
    "Equinox: attention, dropout, AdamW",
    *EQUINOX,
    "docs/examples/vision_transformer.ipynb",
    """
 import optax  # https://github.com/deepmind/optax
+from optax_lossscale import LossScaleOptimizer, autocast

-@eqx.filter_value_and_grad
+@autocast
 def compute_grads(

-    loss, grads = compute_grads(model, images, labels, key)
+    loss, grads = optimizer.value_and_grad(compute_grads, state)(model, images, labels, key)

-optimizer = optax.adamw(
+optimizer = LossScaleOptimizer(optax.adamw(
     learning_rate=lr,
     b1=beta1,
     b2=beta2,
-)
+))
""",
    "",
    """
-import torch
-import torchvision
-import torchvision.transforms as transforms
+from unittest import mock
+torch = torchvision = transforms = mock.MagicMock()

-lr = 0.0001
+lr = 0.001

-batch_size = 64
+batch_size = 16

-num_steps = 100000
+num_steps = 200

-embedding_dim = 512
-hidden_dim = 256
+embedding_dim = 64
+hidden_dim = 128

-num_layers = 6
+num_layers = 2

 testloader = torch.utils.data.DataLoader(
     test_dataset, batch_size=batch_size, shuffle=True, drop_last=True
 )
+from benchmarks.public.data import digits, tensors
+trainloader = tensors(batch_size, digits(32)[0][:, None].repeat(3, 1), digits(32)[1])
+testloader, test_dataset = trainloader, range(64)

         losses.append(loss)
+        record(loss, state)
""",
)

NUMPYRO = Program(
    "SVI",
    "NumPyro: stochastic variational inference, a trainer that computes the gradients",
    "pyro-ppl/numpyro",
    "0b935d488056ae1775b4ab05cbe2812f51f21a4f",
    "examples/vae.py",
    """
 import numpyro
 from numpyro import optim
+import optax
+from optax_lossscale import LossScaleOptimizer, autocast, scale_as_parameter, with_loss_scale

+class Float16ELBO(Trace_ELBO):
+    def loss_with_mutable_state(self, rng_key, params, *args, **kwargs):
+        def loss_fn(params):
+            result = Trace_ELBO.loss_with_mutable_state(self, rng_key, params, *args, **kwargs)
+            return result["loss"], result
+
+        loss, result = with_loss_scale(autocast(loss_fn), has_aux=True)(params)
+        return result | {"loss": loss}
+
+
 def guide(batch, hidden_dim=400, z_dim=100):
     batch = jnp.reshape(batch, (batch.shape[0], -1))
+    numpyro.param("loss_scale", jnp.float32(2.0**15))

-    adam = optim.Adam(args.learning_rate)
+    adam = scale_as_parameter(LossScaleOptimizer(optax.adam(args.learning_rate)))

-        model, guide, adam, Trace_ELBO(), hidden_dim=args.hidden_dim, z_dim=args.z_dim
+        model, guide, adam, Float16ELBO(), hidden_dim=args.hidden_dim, z_dim=args.z_dim
""",
    """
from benchmarks.public.data import digits

def load_dataset(*_, batch_size, split):
    images = jnp.asarray(digits(28)[0])
    count = len(images) // batch_size

    def fetch(i, idx):
        rows = lax.dynamic_slice_in_dim(idx, i * batch_size, batch_size)
        return images[rows], rows

    return (lambda: (count, jnp.arange(len(images)))), fetch

main(argparse.Namespace(num_epochs=7, learning_rate=1e-3, batch_size=128, z_dim=50, hidden_dim=400))
""",
    """
             svi_state, loss = svi.update(svi_state, batch)
+            record(loss, svi_state)
""",
    note="Add the scale to a trainer that computes the gradients itself.",
)

PROGRAMS = [CNN, VAE, PPO, DIFFUSION, GAN, LATENT_ODE, LANGUAGE_MODEL, NANO, GRAPH]
PROGRAMS += [VISION, NUMPYRO]
