import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from ms_accum import make_train_step
from tutorials.mnist.data import load

def make_step(microbatch, accumulate_step=None, stages=()):
    network = nn.SequentialCell(nn.Dense(784, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10))
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(images, labels):
        return loss_fn(network(images), labels)

    optimizer = nn.Adam(network.trainable_params(), learning_rate=1e-3)
    train_step = make_train_step(forward_fn, optimizer, accumulate_step or 2048 // microbatch, stages=stages)
    (digits, _), rng = load("embedded"), np.random.default_rng(0)

    def step():
        images, labels = digits.batch(rng.integers(len(digits), size=microbatch))  # shuffled
        return train_step(Tensor(images.reshape(-1, 784) / 255, ms.float32), Tensor(labels))

    return step, train_step

ended()
from ms_accum.batch_size import GradientNoiseScale

noise_scale = GradientNoiseScale()
step, train_step = make_step(64, accumulate_step=4, stages=(noise_scale,))
for _ in range(40):
    step()
print(f"{noise_scale.scale():.1e} samples")

ended()
