"""A ResNet's training steps by `torch.compile`, a block of them for each line of input.

    echo 16 | python benchmarks/torch_resnet.py resnet50 256 bfloat16 0.5

Its arguments are torchvision's name of the network, the batch, the type of weights and
computation, and `torch._functorch.config.activation_memory_budget`. SGD with momentum, images
channels last, random data. It prints a line of JSON when it has warmed up: PyTorch's version, the
losses of its first two steps and the most bytes that its allocator gave out in a step. Then for each
number of steps that it reads it runs so many and prints their milliseconds a step.

`training_steps.py` starts one for each way `torch.compile`, so that it takes turns with steps of JAX.
PyTorch and torchvision are not among what vmem_jax installs.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torchvision

WARM_UP = 4
"""Steps before the line that says so; the first compiles."""


def main(name: str, batch: str, dtype: str, budget: str) -> None:
    torch.backends.cudnn.benchmark = True
    torch._functorch.config.activation_memory_budget = float(budget)
    torch.manual_seed(0)
    kind, last = getattr(torch, dtype), torch.channels_last
    network = torchvision.models.get_model(name).cuda().to(kind, memory_format=last)
    images = torch.randn(int(batch), 3, 224, 224, device="cuda", dtype=kind)
    images = images.to(memory_format=last)
    labels = torch.randint(1000, (int(batch),), device="cuda")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    compiled = torch.compile(network)

    def step() -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(compiled(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses = [step().item() for _ in range(WARM_UP)]
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    about = {"torch": torch.__version__, "loss": losses[0], "loss_after": losses[1]}
    print(json.dumps(about | {"nbytes": torch.cuda.max_memory_allocated()}), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            step()
        torch.cuda.synchronize()
        print(1e3 * (time.perf_counter() - begun) / int(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
